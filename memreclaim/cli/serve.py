"""``memreclaim serve``: the service on one machine, or the head node's view of many ranks."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memreclaim.cli.exit_codes import ExitCode
from memreclaim.config import Mode, Settings
from memreclaim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memreclaim.cli.screen import Screen
    from memreclaim.service.settings import ServiceSettings

SUMMARY = "serve metrics, reports and the status page: of the embedded engine, or of all ranks from a head node"
HEAD_PORT = 9410
_POOL_TOKENS = 1024
_LONGEST_INTERVAL = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, where, and under which load."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--engine", choices=("reference",), help="run this engine here and serve its one rank")
    what.add_argument("--ranks", metavar="URL,...|FILE", help="head node: poll these ranks, or those listed in a file")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="address (default: MEMRECLAIM_HTTP, else port 9411 of 127.0.0.1, head node 9410); port 0 takes a free one",
    )
    parser.add_argument(
        "--expect", type=_ranks, metavar="N", help="head node: ranks that the engine runs (default: those named)"
    )
    parser.add_argument("--rank-token-file", metavar="FILE", help="head node: token that the ranks accept (mode 0600)")
    parser.add_argument("--rank-ca", metavar="FILE", help="head node: certificate authority of the ranks' certificates")
    parser.add_argument(
        "--dir", type=Path, metavar="FOLDER", help="where the demo's checkpoint is kept (default: as for demo)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: %(default)s)")
    parser.add_argument(
        "--request-seconds",
        type=_interval,
        default=2.0,
        metavar="S",
        help="time between two requests of the steady load, 0 for none (default: %(default)s)",
    )
    parser.add_argument("--model-name", default="memreclaim-demo", help="label of all series (default: %(default)s)")
    parser.add_argument(
        "--tp-rank", type=_ranks_from_zero, default=0, metavar="N", help="label of all series (default: %(default)s)"
    )
    parser.add_argument("--plant-mismatch", action="store_true", help="change one bit of one layer, so that it is kept")


def run(arguments: argparse.Namespace, screen: Screen) -> ExitCode:
    """Serve until SIGTERM or Ctrl-C."""
    from memreclaim.observe import logs

    settings = Settings.from_env()
    logs.use_json() if settings.log_format == "json" else logs.use_plain()
    if arguments.ranks is not None:
        return _head(arguments, screen, settings)
    return _reference(
        arguments, screen, replace(settings, mode=Mode.ON if settings.mode is Mode.OFF else settings.mode)
    )


def _reference(arguments: argparse.Namespace, screen: Screen, settings: Settings) -> ExitCode:
    from memreclaim.cli import demo
    from memreclaim.engines import reference
    from memreclaim.engines.reference import ReferenceAdapter
    from memreclaim.rank_snapshot import Identity
    from memreclaim.rebuild import checkpoint_source
    from memreclaim.reclaimer import Reclaimer
    from memreclaim.service.demo import SteadyLoad, first_weight
    from memreclaim.service.rank import start_rank_service

    service_settings = _service_settings(arguments, settings, 9411)
    device = demo._device(arguments.device)
    config = reference.ModelConfig.demo()
    path = demo.ensure_checkpoint(arguments.dir or demo.default_folder(), config)
    model = reference.load_model(path, device=device)
    if arguments.plant_mismatch:
        demo._plant_mismatch(model)
    pool = reference.PagedPool(config, capacity_tokens=_POOL_TOKENS, device=device)
    server = reference.Server(model, pool, record_logits=False)
    adapter = ReferenceAdapter(model, pool, server)
    reclaimer = Reclaimer(settings, pool=pool)
    identity = Identity(arguments.model_name, tp_rank=arguments.tp_rank)
    service = start_rank_service(
        reclaimer,
        adapter,
        service_settings,
        identity=identity,
        ranks=arguments.expect or 1,
        source=checkpoint_source(path),
    )
    try:
        if service_settings.probe_seconds:
            service.probe.baseline(*first_weight(model))
        service.reclaim_at_start()
        load = SteadyLoad(server, arguments.request_seconds)
        with server:
            load.start()
            _until_told(screen, service.url)
            load.close()
    finally:
        service.close()
    return ExitCode.OK


def _head(arguments: argparse.Namespace, screen: Screen, settings: Settings) -> ExitCode:
    from memreclaim.service.client import Client
    from memreclaim.service.head import Head
    from memreclaim.service.settings import read_token

    token = read_token(arguments.rank_token_file, "--rank-token-file")
    head = Head(
        tuple(_urls(arguments.ranks)),
        _service_settings(arguments, settings, HEAD_PORT),
        expected=arguments.expect,
        client=Client(token=token, ca_file=arguments.rank_ca),
    )
    head.start()
    try:
        _until_told(screen, head.url)
    finally:
        head.close()
    return ExitCode.OK


def _service_settings(arguments: argparse.Namespace, settings: Settings, port: int) -> ServiceSettings:
    from memreclaim.service.settings import ServiceSettings

    address = settings.http or ("127.0.0.1", port)
    if arguments.listen is not None:
        host, colon, number = arguments.listen.rpartition(":")
        if not colon or not host or not number.isascii() or not number.isdigit() or int(number) > 65535:  # noqa: PLR2004
            raise ConfigError("--listen", f"{arguments.listen!r} is not host:port")
        address = host.strip("[]"), int(number)
    return ServiceSettings.from_env(address)


def _urls(named: str) -> Iterator[str]:
    """URLs from a comma-separated list, or from a file with one a line and comments after ``#``."""
    if "://" in named:
        yield from (url.strip() for url in named.split(",") if url.strip())
        return
    try:
        lines = Path(named).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--ranks", f"{named!r} is neither a list of URLs nor a file that can be read") from error
    yield from (line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip())


def _until_told(screen: Screen, url: str) -> None:
    """Say where, then wait for SIGTERM or Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    screen.data({"schema_version": 1, "url": url}, f"serving on {url}")
    sys.stdout.flush()
    stop.wait()


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_INTERVAL:
        message = f"{text!r} is not a time between 0 and {_LONGEST_INTERVAL:.0f} s"
        raise argparse.ArgumentTypeError(message)
    return value


def _ranks(text: str) -> int:
    from memreclaim.cli.arguments import count

    return count(text)


def _ranks_from_zero(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        message = f"{text!r} is not a whole number"
        raise argparse.ArgumentTypeError(message)
    return int(text)
