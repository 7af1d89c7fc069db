"""The embedded engine: a small decoder of DeepSeek-V4.1's shapes that serves on any device that torch runs on.

It exists so that reclaiming can be seen whole without a cluster: grouped ``wo_a``, paged latent KV, a draft block and
its verification, continuous batching, a checkpoint of the real layout.
"""

from __future__ import annotations

from memreclaim.engines.reference.adapter import ReferenceAdapter
from memreclaim.engines.reference.batch import Batch, Segment
from memreclaim.engines.reference.config import ModelConfig, TensorParallel
from memreclaim.engines.reference.loader import load_model, load_weights, weights
from memreclaim.engines.reference.model import ReferenceModel
from memreclaim.engines.reference.pages import PageTable, Paging
from memreclaim.engines.reference.pool import PagedPool
from memreclaim.engines.reference.request import Request
from memreclaim.engines.reference.server import Server
from memreclaim.engines.reference.synthesis import random_checkpoint_tensors, write_random_checkpoint
from memreclaim.engines.reference.workload import (
    Scenario,
    ServedRun,
    Workload,
    burst,
    row_range,
    serve_workload,
    workload,
)

__all__ = [
    "Batch",
    "ModelConfig",
    "PageTable",
    "PagedPool",
    "Paging",
    "ReferenceAdapter",
    "ReferenceModel",
    "Request",
    "Scenario",
    "Segment",
    "ServedRun",
    "Server",
    "TensorParallel",
    "Workload",
    "burst",
    "load_model",
    "load_weights",
    "random_checkpoint_tensors",
    "row_range",
    "serve_workload",
    "weights",
    "workload",
    "write_random_checkpoint",
]
