"""The benches of training steps, each as a table: models, wires, systems, bars.

`training` compares the cost of a step with the limit and with other libraries. `placement` measures
on real models the gain of producing gradients where they are needed: `plan` does that, `copy` is
the same transport without that analysis, `computation` the same workers without exchange. After all
turns the parameters of `copy` must equal those of `plan` to the bit. `parameters` has sparse tables
with Adagrad; `optimizers.py` measures servers with other optimizers. `LINKS` has shaped links.
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
"""Push and pull between two hosts over links so slow that CPU does not limit them."""
