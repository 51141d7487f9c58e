# Copyright (c) 2026, Megatron MIMO overlay contributors.
# SPDX-License-Identifier: Apache-2.0
"""The layout planner: finds the fastest pair of layouts for a number of GPUs.

A *plan* is a checked pair of the training program's ``Layouts`` with a recompute setting. The
planner enumerates plans, asks the program's own rules whether they may run, and prices each one:

- ``layers`` counts the work of a layer and what it keeps, ``parameters`` what ranks hold;
  ``memory`` adds up the bytes of every pipeline stage.
- ``machine`` says how long a machine takes for work, and for collectives of groups of ranks.
- ``schedule`` puts costs into Megatron's own order of microbatches; ``step_time`` computes the
  costs of a plan, and the time of its step.
- ``search`` ranks the plans, ``report`` shows them.

Nothing is started, and no device is used.
"""
