# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layout planner: finds the fastest pair of layouts for a number of GPUs.

A *plan* is a checked pair of the training program's ``Layouts`` with a recompute setting. The
planner enumerates plans, asks the program's own rules whether they may run, and prices each one:

- ``parameters`` lists the sizes of a rank's parameters, ``activations`` the elements that a layer
  keeps for its backward; ``memory`` computes the bytes of both, for every pipeline stage.
- ``flops`` counts the work of a layer, ``machine`` says how long a machine takes for it,
  ``communication`` adds collectives by the alpha-beta model, over the links between their ranks.
- ``step_time`` puts both into Megatron's own order of microbatches (``schedule``).
- ``search`` ranks the plans, ``report`` shows them.

All of it is arithmetic on plain data: no process, no device. In tools/calibration of the
repository, ``calibrate`` measures a machine's figures and ``validate`` checks predictions.
"""
