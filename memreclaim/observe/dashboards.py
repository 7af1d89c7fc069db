"""Grafana dashboards, built from :mod:`memreclaim.observe.panels` with Grafana's own builder.

``grafana-foundation-sdk==0.0.21`` writes classic JSON of schema version 42; other releases write another schema. The
JSON is committed in ``dashboards/``, and a test builds it again and compares every byte.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, Final

from memreclaim.errors import ConfigError
from memreclaim.observe.panels import ROWS, SGLANG_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memreclaim.observe.panels import Panel, Query, Row

SDK: Final = "grafana-foundation-sdk==0.0.21"
_SOURCE: Final = "$datasource"
_VARIABLES: Final = (
    ("job", "label_values(memreclaim_build_info, job)"),
    ("instance", 'label_values(memreclaim_build_info{job=~"$job"}, instance)'),
    ("model_name", 'label_values(memreclaim_build_info{job=~"$job"}, model_name)'),
    ("tp_rank", 'label_values(memreclaim_build_info{job=~"$job",model_name=~"$model_name"}, tp_rank)'),
)
_BUILDERS: Final = {
    "stat": ("stat", "Panel"),
    "timeseries": ("timeseries", "Panel"),
    "table": ("table", "Panel"),
    "heatmap": ("heatmap", "Panel"),
    "state-timeline": ("statetimeline", "Panel"),
}


def rendered() -> dict[str, str]:
    """File name and JSON text of each dashboard. Raises :class:`ConfigError` without the builder."""
    with warnings.catch_warnings():
        # The builder advises its second schema; Grafana up to 12 reads only the classic one.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _both()


def _both() -> dict[str, str]:
    return {
        "memreclaim.json": _dashboard(
            "memreclaim", "memreclaim", "What memreclaim reclaimed, and how it serves.", ROWS
        ),
        "memreclaim-sglang.json": _dashboard(
            "memreclaim-sglang",
            "memreclaim and SGLang",
            "The KV pool as the engine and memreclaim see it.",
            SGLANG_ROWS,
        ),
    }


def _dashboard(uid: str, title: str, description: str, rows: Sequence[Row]) -> str:
    try:
        from grafana_foundation_sdk.builders import dashboard as builders
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.models.dashboard import DashboardCursorSync
    except ModuleNotFoundError as error:
        raise ConfigError("dashboards", f"building them needs {SDK}: pip install 'memreclaim[dashboards]'") from error
    board = builders.Dashboard(title).uid(uid).description(description).tags(["memreclaim"]).refresh("30s")
    board = board.time("now-3h", "now").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR).editable()
    for variable in _variables():
        board = board.with_variable(variable)
    for row in rows:
        board = board.with_row(builders.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(_panel(panel))
    raw = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(board.build()))
    # The builder leaves panel ids null and gives every row the id 0.
    for identifier, panel in enumerate(raw["panels"], start=1):
        panel["id"] = identifier
    return json.dumps(raw, indent=2, sort_keys=True) + "\n"


def _variables() -> list[Any]:
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.models.common import DataSourceRef
    from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

    everything = VariableOption(text="All", value="$__all", selected=True)
    made: list[Any] = [builders.DatasourceVariable("datasource").label("Data source").type("prometheus")]
    for name, query in _VARIABLES:
        made.append(
            builders.QueryVariable(name)
            .label(name)
            .query(query)
            .definition(query)
            .datasource(DataSourceRef(type_val="prometheus", uid=_SOURCE))
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)  # noqa: FBT003  the builder's own way
            .include_all(True)  # noqa: FBT003
            .all_value(".*")
            .current(everything)
        )
    return made


def _panel(panel: Panel) -> Any:  # noqa: ANN401  the builders have no common type
    from importlib import import_module

    from grafana_foundation_sdk.builders import common
    from grafana_foundation_sdk.models.common import DataSourceRef

    module, name = _BUILDERS[panel.kind]
    kind = import_module(f"grafana_foundation_sdk.builders.{module}")
    made = getattr(kind, name)().title(panel.title).description(panel.description).unit(panel.unit)
    made = made.datasource(DataSourceRef(type_val="prometheus", uid=_SOURCE)).span(panel.width).height(panel.height)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        made = made.with_target(_target(query, letter, instant=query.table or panel.kind == "stat"))
    if panel.bad_above is not None or panel.bad_below is not None or panel.mappings:
        made = made.thresholds(_thresholds(panel))
    if panel.mappings:
        made = made.mappings([_mapping(panel)])
    if panel.kind == "timeseries":
        made = made.min(0).legend(common.VizLegendOptions().show_legend(True).calcs(["lastNotNull"]))  # noqa: FBT003
        made = made.tooltip(common.VizTooltipOptions().mode(_multi()))
    if panel.kind == "table":
        made = made.with_transformation(_tidy())
    return _styled(made, panel)


def _styled(made: Any, panel: Panel) -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.models import common as models
    from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

    if panel.kind == "stat":
        from grafana_foundation_sdk.builders import common

        return (
            made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(models.BigValueGraphMode.AREA)
            .color_mode(
                models.BigValueColorMode.BACKGROUND if panel.bad_above is not None else models.BigValueColorMode.VALUE
            )
        )
    if panel.kind == "heatmap":
        from grafana_foundation_sdk.builders import heatmap

        options = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis").steps(64)
        return made.calculate(False).color(options).y_axis(heatmap.YAxisConfig().unit(panel.unit))  # noqa: FBT003
    return made


def _target(query: Query, letter: str, *, instant: bool) -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.builders import prometheus
    from grafana_foundation_sdk.models.common import DataSourceRef
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

    made = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
    made = made.datasource(DataSourceRef(type_val="prometheus", uid=_SOURCE))
    if query.table:
        made = made.format(PromQueryFormat.TABLE)
    elif query.heatmap:
        made = made.format(PromQueryFormat.HEATMAP)
    return made.instant() if instant else made.range()


def _thresholds(panel: Panel) -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
    from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

    steps = [Threshold(value=None, color="red" if panel.bad_below is not None else "green")]
    if panel.bad_below is not None:
        steps.append(Threshold(value=panel.bad_below, color="green"))
    if panel.bad_above is not None:
        steps.append(Threshold(value=panel.bad_above, color="red"))
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _mapping(panel: Panel) -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.models.dashboard import ValueMap, ValueMappingResult

    options = {
        value: ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(panel.mappings.items())
    }
    return ValueMap(options=options)


def _multi() -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.models.common import TooltipDisplayMode

    return TooltipDisplayMode.MULTI


def _tidy() -> Any:  # noqa: ANN401
    from grafana_foundation_sdk.models.dashboard import DataTransformerConfig

    hidden = ("Time", "__name__", "job", "engine_type", "pp_rank", "dp_rank", "moe_ep_rank")
    return DataTransformerConfig(id_val="organize", options={"excludeByName": dict.fromkeys(hidden, True)})
