"""Preparation for the import of megatron-core. The fork server can only import modules, so this one makes the call."""

from __future__ import annotations

from megatron_ext.platform.device import prepare_megatron_import

prepare_megatron_import()
