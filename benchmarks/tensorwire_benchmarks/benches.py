"""The benches of training steps: models, wires, systems, bars, each as a table.

`training` asks what a step costs beside the limit and other libraries, `placement` what it gains on
real models that gradients are produced where they are needed: `plan` does that, `copy` is the same
transport without that analysis, `computation` the same workers with no exchange. After all its
turns `copy` must have the very bits of `plan`. `parameters` has sparse tables with Adagrad; what
servers do for other optimizers is measured in `optimizers`, and `LINKS` are its shaped links.
"""

from __future__ import annotations

from dataclasses import replace

from tensorwire_benchmarks import alone, verdicts
from tensorwire_benchmarks.bench import ALONE, Bench
from tensorwire_benchmarks.systems import (
    COMPUTATION,
    COPY,
    GRPC,
    GRPC_ATTACHED,
    GRPC_RUNTIME,
    LIMIT,
    OWN,
    PLAIN,
    PLAN,
    SYSTEMS,
)
from tensorwire_benchmarks.workloads.catalog import DLRM_ADAGRAD, MODELS, WORKLOADS, named, workload

OPTIMIZERS = ("sgd", "adamw")

TRAINING = Bench(
    name="training",
    models=MODELS,
    quick=MODELS[:2],
    wires=("shm", "tcp", ALONE),
    usual=("shm", "tcp", ALONE),
    systems=SYSTEMS,
    names=(OWN, LIMIT, *(system.name for system in SYSTEMS if system.name != OWN)),
    alone=alone.beside_plain,
    judge=verdicts.judge_training,
)

PLACEMENT = Bench(
    name="placement",
    called="workloads",
    models=WORKLOADS,
    quick=(workload("fcn5"), workload("lstm")),
    wires=("shm", "tcp", "1gbit"),
    usual=("shm", "tcp"),
    systems=(PLAN, COPY, COMPUTATION, GRPC, GRPC_ATTACHED, GRPC_RUNTIME),
    names=(
        PLAN.name,
        LIMIT,
        COPY.name,
        COMPUTATION.name,
        GRPC.name,
        GRPC_ATTACHED.name,
        GRPC_RUNTIME.name,
    ),
    own=PLAN.name,
    stem="{model}/{wire}",
    joint="/",
    whole="exchange",
    judge=verdicts.judge_placement,
    judge_ends=verdicts.judge_ends,
    parts=True,
    links={"1gbit": 1000},
)

PARAMETERS = Bench(
    name="parameters",
    models=(DLRM_ADAGRAD,),
    quick=(DLRM_ADAGRAD.reduced(),),
    wires=("shm", "tcp"),
    usual=("shm", "tcp"),
    systems=(*SYSTEMS[:2], PLAIN),
    names=(*(system.name for system in SYSTEMS[:2]), PLAIN.name),
    judge=verdicts.judge_parameters,
)

LINKS = Bench(
    name="parameters",
    called="models on links",
    models=(replace(named("mlp50", MODELS), steps=20),),
    quick=(replace(named("mlp50", MODELS), steps=6).reduced(),),
    wires=("1gbit", "2.5gbit", "5gbit"),
    usual=("1gbit", "2.5gbit", "5gbit"),
    systems=(SYSTEMS[0], GRPC),
    names=(OWN, LIMIT, GRPC.name),
    judge=verdicts.judge_links,
    links={"1gbit": 1000, "2.5gbit": 2500, "5gbit": 5000},
)
"""Push and pull between two hosts, whose cores do not bound them as long as CPU suffices."""
