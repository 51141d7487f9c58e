# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layout planner: which two layouts, for so many GPUs, and how sure is it?

A *plan* is a pair of checked ``Layouts`` of the training program and what is recomputed. The
planner enumerates plans, asks the program's own rules whether they may run, and prices each one:

- ``parameters`` lists the sizes of all parameters of a rank, ``activations`` the numbers that a
  layer keeps for its backward; ``memory`` makes bytes of both, for every pipeline stage.
- ``flops`` counts the work of a layer, ``machine`` says how long a machine takes for it,
  ``communication`` adds collectives by alpha-beta, over links that the rank map says they use.
- ``step_time`` puts both into Megatron's own order of microbatches (``schedule``).
- ``search`` ranks the plans, ``report`` shows them; ``goodput`` simulates a week with failures.

All of it is arithmetic on plain data: no process, no device. What it rests on is measured by
``calibrate`` and compared by ``validate``, in tools/calibration of the repository.
"""
