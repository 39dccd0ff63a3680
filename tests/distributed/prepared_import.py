"""Preparation for megatron-core on the CPU. The fork server imports this module first, as commands call it first."""

from __future__ import annotations

from megatron_ext.platform.device import prepare_megatron_import

prepare_megatron_import()
