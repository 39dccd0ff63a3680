"""Grouping of runs by architecture, and the groups' names."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.analysis.architecture import group_runs, mixer_label
from megatron_ext.analysis.run_files import ModelSize, Texts
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.errors import UserError


def make_run(pattern, mixers=None, *, seed=1, name="run", text=None, changed=(), **sections):
    config = {"model": {"pattern": pattern, **sections.pop("model", {})}, "mixers": mixers or {}}
    config |= {"training": {"seed": seed, **sections.pop("training", {})}, "run": {"name": name}, **sections}
    empty = np.zeros(0)
    data = None if text is None else Texts(text, "tests", [])
    size = ModelSize(9, 1, 1, data, list(changed))
    return Run(Path(name), name, config, seed, empty, empty, empty, empty, empty, (), size)


def labels(*runs):
    return [one.label for one in group_runs(runs)]


@pytest.mark.parametrize(
    ("pattern", "mixers", "label"),
    [
        ("attention*12", {}, "attention"),
        ("attention * 12", {"attention": {"window": None, "temperature": 1.0}}, "attention"),
        ("attention*12", {"attention": {"window": 256}}, "attention (window 256)"),
        ("attention*12", {"attention": {"random_keys": True}}, "attention (random_keys)"),
        ("attention*12", {"attention": {"position_encoding": "alibi"}}, "attention (position_encoding alibi)"),
        ("top1_chunk*4", {}, "top1_chunk (exact)"),
        ("top1_chunk*4", {"top1_chunk": {"chunk_size": 32, "score": "approx"}}, "top1_chunk (approx, chunk_size 32)"),
        ("top1_chunk*4", {"top1_chunk": {"local": False}}, "top1_chunk (exact, no local)"),
        ("top1_element,top1_element*3", {}, "top1_element"),
        ("gated_deltanet*4", {"attention": {"window": 9}}, "gated_deltanet"),
        ("(top1_chunk*3, attention)*4", {}, "(top1_chunk*3,attention)*4 (exact)"),
        ("moba*4", {"moba": {"top_k": 6, "block_size": 1024}}, "moba (block_size 1024, top_k 6)"),
        ("nsa*4", {"nsa": {"window": 64, "num_selected": 8}}, "nsa (num_selected 8, window 64)"),
        ("deltanet*4", {"deltanet": {"output_gate": True, "expand_v": 2}}, "deltanet (expand_v 2, output_gate)"),
        ("gated_deltanet*4", {"gated_deltanet": {"output_gate": False}}, "gated_deltanet (no output_gate)"),
        ("linear_attention*4", {"linear_attention": {"feature_map": "relu"}}, "linear_attention (feature_map relu)"),
        ("based*4", {"based": {"feature_dim": 32}}, "based (feature_dim 32)"),
        ("retnet*4", {"retnet": {"expand_v": 1, "output_gate": False}}, "retnet (expand_v 1, no output_gate)"),
        ("gla*4", {"gla": {"decay_temperature": 8.0, "decay_rank": 4}}, "gla (decay_rank 4, decay_temperature 8.0)"),
        ("mamba*4", {"mamba": {"dt_rank": 7, "expand": 1}}, "mamba (expand 1, dt_rank 7)"),
        ("mamba2*4", {"mamba2": {"decay": "none", "convolution": False}}, "mamba2 (no convolution, decay none)"),
        ("rwkv6*4", {"rwkv6": {"mix_rank": 64, "decay_rank": 128}}, "rwkv6 (mix_rank 64, decay_rank 128)"),
        ("rwkv7*4", {"rwkv7": {"rate_rank": 32, "gate_rank": None}}, "rwkv7 (rate_rank 32)"),
    ],
)
def test_label(pattern, mixers, label):
    assert labels(make_run(pattern, mixers)) == [label]


def test_another_block_is_named_and_one_not_said_is_the_transformers():
    of_old_run = make_run("attention*4")
    assert labels(make_run("attention*4", model={"block": "rwkv7"}), of_old_run) == [
        "attention",
        "attention (block rwkv7)",
    ]
    in_block = make_run("top1_chunk*4", {"top1_chunk": {"score": "approx"}}, model={"block": "rwkv7"})
    assert labels(in_block) == ["top1_chunk (approx, block rwkv7)"]
    assert len(group_runs([of_old_run, make_run("attention*4", model={"block": "transformer"}, seed=2)])) == 1


def test_settings_elsewhere_tell_namesakes_apart():
    wide = make_run("attention*4", model={"hidden_size": 128})
    narrow = make_run("attention*4", model={"hidden_size": 64})
    assert labels(wide, narrow) == ["attention (hidden_size 128)", "attention (hidden_size 64)"]
    assert labels(wide, make_run("gla*4", model={"hidden_size": 64})) == ["attention", "gla"]


def test_seeds_are_one_architecture_whatever_does_not_change_the_result():
    runs = [
        make_run("attention*4", seed=1, parallel={"tensor": 2}, optimizer={"lr": 1e-3, "sharding": "none"}),
        make_run(
            "attention*4", {"attention": {"window": None}}, seed=2, optimizer={"lr": 1e-3, "sharding": "megatron"}
        ),
    ]
    (one,) = group_runs(runs)
    assert [run.seed for run in one.runs] == [1, 2]


def test_other_learning_rate_is_not_a_seed():
    runs = [make_run("attention*4", seed=seed, optimizer={"lr": lr}) for seed, lr in ((1, 0.001), (2, 0.01))]
    assert labels(*runs) == ["attention (lr 0.001)", "attention (lr 0.01)"]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({}, {"data": {"reset_attention": True}}, ["no reset_attention", "reset_attention"]),
        ({}, {"data": {"reset_positions": True}}, ["no reset_positions", "reset_positions"]),
        ({}, {"training": {"fp8": "tensorwise"}}, ["fp8 none", "fp8 tensorwise"]),
        ({}, {"data": {"weights": {"A": 1, "B": 3}}}, ["weights none", "weights 0.25:0.75"]),
        ({}, {"data": {"seq_length": 512}}, ["seq_length 2048", "seq_length 512"]),
        ({}, {"optimizer": {"weight_decay": 0.2}}, ["weight_decay 0.1", "weight_decay 0.2"]),
        ({}, {"optimizer": {"name": "lion"}}, ["optimizer adamw", "optimizer lion"]),
        ({}, {"resilience": {"on_spike": "skip"}}, ["on_spike ignore", "on_spike skip"]),
        ({"text": "aaaaaaaaaa"}, {"text": "bbbbbbbbbb"}, ["text aaaaaaaa", "text bbbbbbbb"]),
        ({}, {"changed": [{"step": 4, "field": "optimizer.lr"}]}, ["changed none", "changed optimizer.lr at step 4"]),
    ],
)
def test_all_that_changes_the_result_makes_another_recipe(one, other, found):
    """Every field counts, unless it is known not to change the result. New fields therefore count by default."""
    names = labels(make_run("attention*4", **one), make_run("attention*4", seed=2, **other))
    assert names == [f"attention ({setting})" for setting in found]


@pytest.mark.parametrize(
    "other",
    [
        {"data": {"path": "elsewhere", "verify": "size"}},
        {"data": {"test_domains": ["ArXiv"]}},
        {"training": {"micro_batch_size": 1, "recompute": "full", "evaluate_every": 7, "checkpoint_every": 5}},
        {"parallel": {"context": 2}, "optimizer": {"sharding": "zero3", "offload": "cpu"}},
        {"resilience": {"heartbeat_seconds": 1.0}},
        {"retrieval": {"lengths": [128]}},
        {"training": {"fp8": "none"}, "data": {"reset_attention": False, "seq_length": 2048}},  # today's defaults
        {"text": "aaaaaaaaaa"},  # the other run is of an earlier version, which did not record its text
    ],
)
def test_names_places_speed_and_what_is_measured_make_none(other):
    (one,) = group_runs([make_run("attention*4"), make_run("attention*4", seed=2, **other)])
    assert [run.seed for run in one.runs] == [1, 2]


def test_weights_in_another_unit_are_the_same():
    runs = [
        make_run("attention*4", seed=seed, data={"weights": weights})
        for seed, weights in enumerate(({"A": 1, "B": 3}, {"B": 0.75, "A": 0.25}))
    ]
    assert len(group_runs(runs)) == 1


def test_baseline_comes_first():
    chunk, delta = make_run("top1_chunk*4"), make_run("gated_deltanet*4")
    window = make_run("attention*4", {"attention": {"window": 64}})
    assert labels(chunk, window, make_run("attention*4")) == [
        "attention",
        "attention (window 64)",
        "top1_chunk (exact)",
    ]
    assert labels(delta, chunk) == ["gated_deltanet", "top1_chunk (exact)"]


def test_same_settings_and_seed_twice():
    with pytest.raises(UserError) as caught:
        group_runs([make_run("attention*4", name="a"), make_run("attention*4", name="b")])
    hint = "remove one of them or change training.seed"
    assert str(caught.value) == f"b: has the same settings and seed (1) as a; {hint}"


def test_every_registered_mixer_is_labelled_by_what_departs_from_its_defaults():
    pytest.importorskip("megatron.core")
    from megatron_ext.mixers.core.registry import load_all

    for name, mixer in load_all().items():
        settings = {one.name: one.default for one in fields(mixer.config_type)}
        (plain,) = labels(make_run(f"{name}*4"))
        assert plain.partition(" ")[0] == name
        assert len(group_runs([make_run(f"{name}*4"), make_run(f"{name}*4", {name: settings}, seed=2)])) == 1
        for setting in settings:
            assert labels(make_run(f"{name}*4", {name: {setting: "other"}})) != [plain], (name, setting)


@pytest.mark.parametrize(
    ("pattern", "mixers", "label"),
    [
        ("attention*12", {}, "attention"),
        ("attention,attention*2", {"attention": {"window": 256}}, "attention (window 256)"),
        ("(top1_chunk*3, attention)*4", {}, "top1_chunk*3,attention (exact)"),
        ("top1_chunk*3,attention,(top1_chunk*2,top1_chunk,attention)*2", {}, "top1_chunk*3,attention (exact)"),
        ("attention,mamba*3", {}, "attention,mamba*3"),
        ("attention,mamba,mamba,attention", {}, "attention,mamba*2,attention"),
    ],
)
def test_layers_of_any_number_have_one_label(pattern, mixers, label):
    assert mixer_label(make_run(pattern, mixers)) == label


def test_what_follows_from_the_width_is_not_said_again():
    """Heads and feed-forward width scale with the model, and are only named where they do not."""
    small = {"hidden_size": 64, "head_dim": 16, "ffn_hidden_size": 192}
    large = {"hidden_size": 128, "head_dim": 32, "ffn_hidden_size": 384}
    runs = [
        make_run("attention*2", model=size, training={"steps": steps}) for size in (small, large) for steps in (5, 9)
    ]
    assert labels(*runs) == [
        "attention (hidden_size 64, steps 5)",
        "attention (hidden_size 64, steps 9)",
        "attention (hidden_size 128, steps 5)",
        "attention (hidden_size 128, steps 9)",
    ]
    broad = make_run("attention*2", model=large | {"ffn_hidden_size": 192}, training={"steps": 5})
    assert labels(runs[0], runs[2], broad) == [
        "attention (ffn_hidden_size 192, hidden_size 64)",
        "attention (ffn_hidden_size 384, hidden_size 128)",
        "attention (ffn_hidden_size 192, hidden_size 128)",
    ]
