"""The configuration: what it reads, what it refuses, and what it says when it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

import ray_pipe
from ray_pipe.checks import check_folder
from ray_pipe.codec_names import ALIASES, BACKWARD, SUFFIXES, canonical_codec, has_memory
from ray_pipe.config import (
    CheckpointConfig,
    CodecConfig,
    ConfigError,
    DataConfig,
    EmbeddingConfig,
    FaultsConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    SyncConfig,
    check_corpus,
    check_repeat_visits,
)
from ray_pipe.errors import StageDied
from ray_pipe.options import option_docs
from ray_pipe.plans import codec_spec
from ray_pipe.settings_file import read_settings, show_settings
from ray_pipe.workload import held_out_samples

SECTIONS = (
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    EmbeddingConfig,
    FaultsConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    SyncConfig,
)


def refusal(*given_settings: str) -> str:
    """What `--set` with these settings is refused with."""
    with pytest.raises(ConfigError) as caught:
        RunConfig(name="x").with_overrides(given_settings)
    return str(caught.value)


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        config.validate()
    return str(caught.value)


# --- what it reads ---------------------------------------------------------------------------


def test_the_defaults_compare_three_arms_for_eight_epochs_at_100_mbps() -> None:
    config = RunConfig()

    assert [arm.name for arm in config.arms] == ["fp32", "directq", "acsgd"]
    assert (config.epochs, config.steps) == (8, None)
    assert config.network.bandwidth_bps == 100e6
    assert config.pipeline.samples_per_step == 64


@pytest.mark.parametrize(
    ("setting", "section", "option", "value"),
    [
        ("codec.fw_bits=2", "codec", "fw_bits", 2),
        ("codec.fw_bits=2.0", "codec", "fw_bits", 2),
        ("codec.checksum=yes", "codec", "checksum", True),
        ("codec.checksum=off", "codec", "checksum", False),
        ("codec.memory_cap=2GB", "codec", "memory_cap", 2_000_000_000),
        ("codec.memory_cap=none", "codec", "memory_cap", None),
        ("codec=topk", "codec", "name", "topk"),
        ("codec.name=none", "codec", "name", "fp32"),
        ("codec.name=directq+zstd+ef", "codec", "name", "directq+ef+zstd"),
        ("network.bandwidth=1.5 Gbit/s", "network", "bandwidth_bps", 1.5e9),
        ("network.bandwidth=12.5 MB/s", "network", "bandwidth_bps", 100e6),
        ("network.bandwidth_bps=1e7", "network", "bandwidth_bps", 1e7),
        ("network.bandwidth=unlimited", "network", "bandwidth_bps", math.inf),
        ("network.latency=20ms", "network", "latency_s", 0.02),
        ("network.latency=0", "network", "latency_s", 0.0),
        ("network.loss_rate=1%", "network", "loss_rate", 0.01),
        ("optim.lr=3e-4", "optim", "lr", 3e-4),
        ("pipeline.schedule=1f1b", "pipeline", "schedule", "1f1b"),
        ("pipeline.batch_size=48", "pipeline", "micro_batch_size", 12),
        ("model=gpt2", "model", "name", "gpt2"),
        ("data=book=1.txt", "data", "source", "book=1.txt"),
    ],
)
def test_settings_are_read_with_the_type_and_unit_of_their_option(
    setting: str, section: str, option: str, value: Any
) -> None:
    config = RunConfig(name="x").with_overrides([setting])

    read = getattr(getattr(config, section), option)
    assert read == value
    assert type(read) is type(value)


def test_top_level_settings_are_read_too() -> None:
    config = RunConfig().with_overrides(["deadline=2min", "seed=7", "eval=true", "name=a b"])

    assert (config.deadline_s, config.seed, config.eval, config.name) == (120.0, 7, True, "a b")


def test_a_codec_alone_is_one_arm_and_with_compare_it_is_not() -> None:
    alone = RunConfig.from_dict({"codec": "directq"})
    both = RunConfig.from_dict({"codec": "topk", "compare": "fp32,topk"})

    assert [arm.name for arm in alone.arms] == ["directq"]
    assert [arm.name for arm in both.arms] == ["fp32", "topk"]


def names_of(config: RunConfig) -> list[str]:
    return [arm.name for arm in config.arms]


@pytest.mark.parametrize("name", ["directq", "acsgd"])
def test_a_codec_asked_for_from_python_is_the_one_that_is_trained(name: str) -> None:
    asked = CodecConfig(name=name)

    assert names_of(RunConfig(codec=asked)) == [name]
    assert names_of(dataclasses.replace(RunConfig(), codec=asked)) == [name]
    assert names_of(RunConfig(codec=asked, compare=("fp32", name))) == ["fp32", name]


def test_a_codec_without_a_name_is_compared_like_the_default() -> None:
    assert names_of(RunConfig(codec=CodecConfig(fw_bits=2))) == ["fp32", "directq", "acsgd"]
    assert names_of(RunConfig(compare=())) == ["acsgd"]
    assert names_of(dataclasses.replace(RunConfig(compare=("fp32", "topk")), compare=())) == [
        "acsgd"
    ]


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(codec=CodecConfig(name="directq")),
        RunConfig(compare=("fp32", "directq")),
        RunConfig(compare=()),
        RunConfig(codec=CodecConfig(name="acsgd"), compare=("fp32", "acsgd")),
    ],
)
def test_arms_survive_json_yaml_pickle_and_overrides(config: RunConfig) -> None:
    copies = [
        RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        RunConfig.from_dict(yaml.safe_load(show_settings(config))),
        pickle.loads(pickle.dumps(config)),
        config.with_overrides(["seed=1"]),
        dataclasses.replace(config, seed=1),
    ]

    assert [names_of(copy) for copy in copies] == [names_of(config)] * 5


def test_a_comparison_of_a_later_layer_takes_away_a_codec_that_is_not_in_it() -> None:
    file = {"codec": "topk", "compare": "fp32,topk"}

    config = RunConfig.from_layers([("file", file), ("flags", {"compare": "fp32,directq"})])

    assert names_of(config) == ["fp32", "directq"]
    assert names_of(RunConfig().with_overrides(["compare=fp32,directq"])) == ["fp32", "directq"]


def test_arms_share_everything_but_the_name() -> None:
    config = RunConfig(codec=CodecConfig(fw_bits=2))

    assert [(arm.name, arm.fw_bits) for arm in config.arms] == [
        ("fp32", 2),
        ("directq", 2),
        ("acsgd", 2),
    ]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("acsgd", "acsgd", "directq"),
        ("acsgd+zstd", "acsgd+zstd", "directq+zstd"),
        ("acsgd-topk", "acsgd-topk", "topk"),
        ("acsgd-reference", "acsgd-reference", "reference"),
        ("fp32", "fp32", "fp32"),
        ("topk+ef", "topk", "topk+ef"),
        ("identity", "fp32", "fp32"),
    ],
)
def test_gradients_never_get_a_codec_with_memory(name: str, forward: str, backward: str) -> None:
    codec = CodecConfig(name=name)

    assert (codec.forward_name, codec.backward_name) == (forward, backward)
    assert not has_memory(codec.backward_name)


def test_steps_take_the_place_of_epochs_and_the_other_way_round() -> None:
    by_steps = RunConfig().with_overrides(["steps=5"])
    by_epochs = by_steps.with_overrides(["epochs=3"])

    assert (by_steps.epochs, by_steps.steps) == (None, 5)
    assert (by_epochs.epochs, by_epochs.steps) == (3, None)


def test_later_layers_beat_earlier_ones() -> None:
    config = RunConfig.from_layers(
        [
            ("run.yaml", {"codec": {"fw_bits": 2, "bw_bits": 6}, "epochs": 2, "seed": 1}),
            ({"codec.fw_bits": "--fw-bits"}, {"codec.fw_bits": "3", "steps": "9"}),
            ("--set", {"codec.fw_bits": "5"}),
        ]
    )

    assert (config.codec.fw_bits, config.codec.bw_bits, config.seed) == (5, 6, 1)
    assert (config.epochs, config.steps) == (None, 9)


def test_a_made_up_name_says_codec_and_bandwidth_and_follows_them() -> None:
    config = RunConfig(compare=(), network=NetworkConfig(bandwidth_bps=10e6))

    assert config.name.startswith("acsgd-10Mbps-")
    assert config.with_overrides(["network.bandwidth=1Gbps"]).name.startswith("acsgd-1Gbps-")
    assert RunConfig(name="mine").with_overrides(["seed=1"]).name == "mine"


def test_a_made_up_name_never_meets_an_old_folder(tmp_path: Path) -> None:
    config = RunConfig(out=str(tmp_path / "runs"))

    folders = [config.make_folder() for _ in range(3)]

    assert [folder.name.removeprefix(config.name) for folder in folders] == ["", "-2", "-3"]
    assert all(folder.is_dir() for folder in folders)


def test_a_copy_keeps_a_made_up_name_and_that_it_was_made_up() -> None:
    config = RunConfig()
    copy = dataclasses.replace(config, seed=1)

    assert (copy.name, copy.name_is_generated) == (config.name, True)
    assert pickle.loads(pickle.dumps(copy)).name_is_generated
    assert not dataclasses.replace(config, name="mine").name_is_generated
    assert not RunConfig.from_dict(config.to_dict()).name_is_generated
    assert type(config.to_dict()["name"]) is str


def test_a_given_name_is_used_again(tmp_path: Path) -> None:
    config = RunConfig(out=str(tmp_path), name="mine")

    assert config.make_folder() == config.make_folder() == tmp_path / "mine"


# --- there and back --------------------------------------------------------------------------

SLOW_MACHINE = settings(max_examples=examples(60), deadline=None)
"""No deadline: a test must not fail because others use the cores."""

OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**32 - 1),
        "steps": st.integers(1, 10**6),
        "eval": st.booleans(),
        "codec.name": st.sampled_from([*BACKWARD, "acsgd+zstd", "topk+ef+zstd", "none"]),
        "codec.fw_bits": st.integers(2, 8),
        "codec.memory_cap": st.none() | st.integers(1, 2**50).map(lambda n: f"{n}B"),
        "codec.spill_ram": st.integers(0, 2**50).map(lambda n: f"{n}B"),
        "codec.density": st.floats(1e-6, 1.0),
        "codec.rows": st.sampled_from(["bf16", "fp32", "int8", "int4", "int2"]),
        "network.bandwidth_bps": st.floats(1.0, 1e12) | st.just("unlimited"),
        "network.latency_s": st.floats(0.0, 100.0),
        "network.loss_rate": st.floats(0.0, 0.5),
        "optim.lr": st.floats(0.0, 10.0),
        "model.layers": st.none() | st.integers(1, 100),
        "data.source": st.text("abc/.=: #'\"-é", min_size=1)
        .map(str.strip)
        .filter(lambda text: text.lower() not in ("", "none", "null")),
    },
)


@pytest.mark.slow
@SLOW_MACHINE
@given(OVERRIDES)
def test_overrides_survive_json_and_yaml(overrides: dict[str, Any]) -> None:
    config = RunConfig(name="x").with_overrides(f"{k}={v}" for k, v in overrides.items())

    by_json = RunConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    by_yaml = RunConfig.from_dict(yaml.safe_load(show_settings(config)))

    assert by_json == config
    assert by_yaml == config


@SLOW_MACHINE
@given(OVERRIDES)
def test_what_is_not_overridden_stays(overrides: dict[str, Any]) -> None:
    plain = RunConfig(name="x").to_dict()
    changed = RunConfig(name="x").with_overrides(f"{k}={v}" for k, v in overrides.items()).to_dict()
    touched = {*overrides, "epochs", "compare"}

    for section in ("model", "data", "pipeline", "codec", "network", "optim"):
        for option, value in changed[section].items():
            if f"{section}.{option}" not in touched:
                assert value == plain[section][option]


@pytest.mark.slow
@SLOW_MACHINE
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_other_setting_is_refused_by_name_and_never_crashes(key: str, value: str) -> None:
    with contextlib.suppress(ConfigError):  # and nothing else
        RunConfig(name="x").with_overrides([f"{key}={value}"])


def test_an_empty_folder_for_black_boxes_and_a_negative_limit_are_refused() -> None:
    assert refusal("faults.black_box=") == (
        "faults.black_box is empty; give a folder, auto, or off."
    )
    assert "faults.max_failures" in refusal("faults.max_failures=-2")


def test_every_option_has_a_meaning_below_it() -> None:
    for section in SECTIONS:
        missing = {f.name for f in dataclasses.fields(section)} - option_docs(section).keys()
        assert not missing, section
    sections = {section.__name__.removesuffix("Config").lower() for section in SECTIONS}
    options = {f.name for f in dataclasses.fields(RunConfig) if f.init} - sections
    assert options <= option_docs(RunConfig).keys()


def test_errors_survive_pickling() -> None:
    died = pickle.loads(pickle.dumps(StageDied(2, 7, "out of memory", "use --stages 2")))

    assert str(died) == "stage 2 died in step 7: out of memory; use --stages 2"
    assert str(pickle.loads(pickle.dumps(ConfigError("no")))) == "no"


def test_the_package_gives_its_names_and_refuses_others() -> None:
    assert ray_pipe.RunConfig is RunConfig
    assert set(ray_pipe.__all__) <= set(dir(ray_pipe))
    assert (ray_pipe.SyncConfig, ray_pipe.EmbeddingConfig) == (SyncConfig, EmbeddingConfig)
    assert ray_pipe.SampleDropout.__module__ == "stages.dropout"
    with pytest.raises(AttributeError, match="no attribute 'Runconfig'"):
        ray_pipe.Runconfig  # noqa: B018


# --- codec names -----------------------------------------------------------------------------


def test_our_page_of_codec_names_is_the_registrys() -> None:
    from compressors import registry

    assert set(BACKWARD) == set(registry.CODECS)
    assert registry.ALIASES == ALIASES
    assert set(registry.SUFFIXES) == set(SUFFIXES)
    suffixes = ["", "+ef", "+zstd", "+ef+zstd", "+zstd+ef", "+ef+ef", "+lz4"]
    for base, suffix in itertools.product([*BACKWARD, *ALIASES, "acsg"], suffixes):
        name = base + suffix
        try:
            ours: object = canonical_codec(name)
        except ConfigError:
            ours = None
        try:
            split_base, split_suffixes = registry.split_name(name)
            theirs: object = "+".join([split_base, *split_suffixes])
        except ValueError:
            theirs = None
        assert ours == theirs, name
        if ours is not None:
            assert has_memory(str(ours)) == registry.needs_repeat_visits(name)


# --- what it refuses, and what it says -------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("codec.fwbits=2", ["--set codec.fwbits", "did you mean 'fw_bits'?"]),
        ("fw_bits=2", ["did you mean 'codec.fw_bits'?"]),
        ("codecs.fw_bits=2", ["did you mean 'codec.fw_bits'?"]),
        ("model.fw_bits=2", ["there is no option 'fw_bits'"]),
        ("bandwidth=1Mbps", ["did you mean 'network.bandwidth'?"]),
        ("sed=1", ["did you mean 'seed'?"]),
        ("qqqqq=1", ["there is no option 'qqqqq'", "--show-config lists every option"]),
        ("network=5", ["'network' is a section", "'5'", "network.bandwidth_bps"]),
        ("name_is_generated=1", ["there is no option 'name_is_generated'"]),
        ("codec.fw_bits", ["expected key=value", "--set codec.fw_bits=2"]),
        ("=2", ["expected key=value"]),
        ("codec.fw_bits=9", ["codec.fw_bits is 9", "at least 1", "at most 8"]),
        ("codec.bw_bits=0", ["codec.bw_bits is 0", "at least 1", "at most 8"]),
        ("codec.fw_bits=2.5", ["a whole number", "'2.5'"]),
        ("codec.fw_bits=two", ["a whole number", "'two'"]),
        ("codec.fw_bits=inf", ["a whole number", "'inf'"]),
        ("codec.checksum=maybe", ["true or false", "'maybe'"]),
        ("codec.first_visit_bits=16", ["is 16", "1 to 8", "32 for full precision"]),
        ("codec.name=acsg", ["no codec 'acsg'", "did you mean 'acsgd'?", "directq"]),
        ("codec.name=acsgd+zst", ["+zst", "did you mean 'zstd'?", "+ef and +zstd"]),
        ("codec.name=acsgd+ef", ["'acsgd+ef'", "leave out +ef"]),
        ("codec.name=topk+ef+ef", ["+ef twice"]),
        ("codec.rows=fp16", ["'fp16'", "'bf16', 'fp32', 'int8', 'int4' or 'int2'"]),
        ("codec.density=0", ["codec.density is 0", "above 0", "at most 1"]),
        ("codec.memory_cap=5", ["'5'", "'200 MB'"]),
        ("compare=fp32,foo", ["compare: there is no codec 'foo'", "acsgd"]),
        ("compare=fp32,fp32", ["'fp32' is listed twice"]),
        ("network.bandwidth=100", ["'100'", "'100Mbps'", "'12.5 MB/s' (bytes)"]),
        ("network.bandwidth=100MB", ["'100MB'", "'100Mbps'"]),
        ("network.bandwidth=0Mbps", ["more than zero"]),
        ("network.bandwidth_bps=0", ["network.bandwidth_bps is 0", "above 0"]),
        ("network.latency=5", ["'5'", "'20ms'"]),
        ("network.bandwith=5Mbps", ["did you mean 'bandwidth'?", "Known are bandwidth, latency"]),
        ("network.loss_rate=0.6", ["network.loss_rate is 0.6", "at most 0.5"]),
        ("optim.lr=-1", ["optim.lr is -1", "at least 0"]),
        ("optim.lr=nan", ["optim.lr is nan"]),
        ("optim.name=adam", ["'adam'", "did you mean 'adamw'?"]),
        ("pipeline.schedule=1f2b", ["did you mean '1f1b'?", "'gpipe', '1f1b' or 'eager-1f1b'"]),
        ("pipeline.transport=pull", ["'push' or 'refs'"]),
        ("pipeline.micro_batches=0", ["pipeline.micro_batches is 0", "at least 1"]),
        ("pipeline.batch_size=30", ["30 samples", "4 micro-batches", "28 or 32"]),
        ("pipeline.batch_size=2", ["2 samples", "4 micro-batches", "--batch-size 4,"]),
        ("pipeline.batch_size=0", ["0 samples", "4 micro-batches", "--batch-size 4,"]),
        ("pipeline.batch_size=-4", ["-4 samples", "4 micro-batches", "--batch-size 4,"]),
        ("model=gpt-tny", ["no model 'gpt-tny'", "did you mean 'gpt-tiny'?", "gpt2"]),
        ("model.heads=3", ["width of 128", "3 heads", "divisor of 128"]),
        ("model.dropout=1", ["model.dropout is 1", "below 1"]),
        ("epochs=0", ["epochs is 0", "at least 1"]),
        ("seed=-1", ["seed is -1", "at least 0"]),
        ("seed=4294967296", ["seed is 4294967296; it must be at least 0 and below 4294967296."]),
        ("codec.group=2e6", ["codec.group is 2000000; it must be at least 1 and at most 1048576."]),
        ("deadline=0s", ["deadline_s is 0", "above 0"]),
        ("name=a/b", ["'a/b'", "--out"]),
        ("name=..", ["'..'", "--out"]),
    ],
)
def test_a_bad_setting_is_refused_with_its_number_and_a_way_out(
    setting: str, parts: list[str]
) -> None:
    message = refusal(setting)

    for part in parts:
        assert part in message


def test_steps_and_epochs_together_are_refused_with_both_numbers() -> None:
    assert "steps=5 and epochs=3 are both given; keep one" in refusal("steps=5", "epochs=3")
    with pytest.raises(ConfigError, match="steps=5 and epochs=3"):
        RunConfig(steps=5, epochs=3)


def test_batch_size_must_agree_with_micro_batch_size() -> None:
    message = refusal("pipeline.batch_size=64", "pipeline.micro_batch_size=4")

    assert "--batch-size 64 over 4 micro-batches is 16 samples each" in message
    assert "--micro-batch-size says 4" in message


def test_a_grid_without_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fw_bits is 1, but the symmetric .* at least 2 bits"):
        CodecConfig(grid="symmetric", fw_bits=1)
    with pytest.raises(ConfigError, match=r"bw_bits is 1, but the reference .* codec.bw_bits=2"):
        CodecConfig(name="reference", bw_bits=1)
    assert CodecConfig(fw_bits=1).fw_bits == 1


def test_wrong_types_from_python_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"codec.fw_bits needs a whole number, got '4'"):
        CodecConfig(fw_bits="4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pipeline.stages needs a whole number, got True"):
        PipelineConfig(stages=True)
    assert NetworkConfig(latency_s=1).latency_s == 1.0


@pytest.mark.parametrize("name", ["topk", "acsgd"])
def test_a_codec_that_no_arm_would_train_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' but compare lists fp32, directq, so it"):
        RunConfig(codec=CodecConfig(name=name), compare=("fp32", "directq"))
    with pytest.raises(ConfigError, match="leave one of the two out"):
        RunConfig.from_dict({"codec": name, "compare": "fp32,directq"})


def test_more_stages_than_blocks_are_refused_with_model_number_and_both_ways_out() -> None:
    message = refused(RunConfig(pipeline=PipelineConfig(stages=5)))

    assert message == (
        "--stages 5: gpt-tiny has 4 blocks and each stage needs at least one; use --stages 4 or "
        "fewer, or a deeper model (--set model.layers=5, or --model)."
    )
    assert RunConfig(pipeline=PipelineConfig(stages=4)).validate() == []
    assert RunConfig().with_overrides(["pipeline.stages=5", "model.layers=5"]).validate() == []


def test_a_users_own_model_is_counted_by_its_blocks() -> None:
    config = RunConfig(pipeline=PipelineConfig(stages=4))

    with pytest.raises(ConfigError, match=r"--stages 4: the model has 3 blocks .* --stages 3"):
        config.validate(num_blocks=3)
    assert config.validate(num_blocks=4) == []


def test_single_pass_with_acsgd_alone_is_refused_and_in_a_comparison_warned_of() -> None:
    text = (
        "epochs is 1, so acsgd meets no sample twice and gains nothing; "
        "use --codec directq for single-pass data, or --epochs 2 and more."
    )

    assert refused(RunConfig(compare=(), epochs=1)) == text
    assert RunConfig(epochs=1).validate() == [text]
    assert RunConfig(compare=("fp32", "directq"), epochs=1).validate() == []
    assert RunConfig(compare=(), epochs=2).validate() == []


def test_steps_that_do_not_come_round_again_are_warned_of() -> None:
    short, long = RunConfig(steps=10), RunConfig(steps=11)

    assert check_repeat_visits(short, 640) == [
        "10 steps of 64 samples are no more than one pass over 640 samples, so acsgd meets no "
        "sample twice and gains nothing; use --codec directq for single-pass data, or more than "
        "10 steps."
    ]
    assert check_repeat_visits(long, 640) == []
    assert check_repeat_visits(RunConfig(steps=10, compare=("fp32", "directq")), 640) == []
    assert check_repeat_visits(RunConfig(epochs=8), 640) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "compressed, and all arms train alike; use --stages 2"),
        (["codec=acsgd"], "nothing is sent, slowed down or compressed; use --stages 2"),
        (["codec=fp32", "network.bandwidth=1Mbps"], "slowed down or compressed; use"),
        (["codec=fp32"], ""),
        (["compare="], ""),
        (["compare=fp32,acsgd", "sync.replicas=2"], ""),
    ],
)
def test_one_stage_has_no_links_and_says_so(settings: list[str], words: str) -> None:
    said = RunConfig().with_overrides(["pipeline.stages=1", *settings]).validate()

    assert bool(said) == bool(words)
    assert words in "".join(said)


def test_a_reference_that_comes_too_late_for_the_arms_before_it_is_told_of() -> None:
    late = RunConfig(compare=("directq", "fp32", "acsgd")).validate()
    first = RunConfig(compare=("fp32", "directq", "acsgd")).validate()
    none = RunConfig(compare=("directq", "acsgd")).validate()

    assert late == [
        "fp32 is trained after directq: an arm that ends a little above its final loss trains on "
        "until it has reached it only if that is known; put it first, --compare fp32,directq,acsgd"
    ]
    assert first == none == []


def test_what_has_no_end_is_refused_or_has_another_word_that_json_can_hold() -> None:
    config = RunConfig(optim=OptimConfig(clip=math.inf))

    assert config.optim.clip == 0.0
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for section, key in ((NetworkConfig, "latency_s"), (OptimConfig, "weight_decay")):
        with pytest.raises(ConfigError, match=f"{key} is inf; it must be .*below inf"):
            section(**{key: math.inf})


def test_dropout_of_our_own_models_needs_no_warning_because_its_mask_is_the_samples() -> None:
    assert RunConfig(model=ModelConfig(dropout=0.1)).validate() == []


def test_error_feedback_is_for_gradients_only() -> None:
    codec = CodecConfig(name="directq+ef+zstd")

    assert (codec.forward_name, codec.backward_name) == ("directq+zstd", "directq+ef+zstd")


def test_a_first_visit_on_a_grid_without_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match="first_visit_bits is 1"):
        CodecConfig(grid="symmetric", first_visit_bits=1)


def test_threads_are_a_number_or_auto() -> None:
    def threads(text: str) -> int:
        return RunConfig().with_overrides([f"pipeline.threads={text}"]).pipeline.num_threads

    assert [threads("1"), threads("16"), threads("Auto")] == [1, 16, 0]
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(ConfigError, match=r"pipeline\.threads.*from 1 to 1024, or auto"):
            threads(wrong)


def test_grids_known_to_hurt_are_warned_of() -> None:
    three_levels = RunConfig().with_overrides(["codec.grid=symmetric", "codec.fw_bits=2"])
    diverges = RunConfig().with_overrides(["codec=reference", "codec.bw_bits=3"])

    assert "three levels; codec.grid=signed" in three_levels.validate()[0]
    assert "codec.bw_bits is 3" in diverges.validate()[0]


def test_spill_ram_is_settable_and_useless_without_a_folder(tmp_path: Path) -> None:
    config = RunConfig().with_overrides(["codec.spill_ram=64MiB", f"codec.spill_dir={tmp_path}"])

    config.validate()
    assert config.codec.spill_ram == 64 * 2**20
    spec = codec_spec(config.codec, "acsgd", 4, 0)
    assert (spec.spill_dir, spec.spill_ram_bytes) == (str(tmp_path), 64 * 2**20)
    assert RunConfig().with_overrides(["codec.spill_ram=0B"]).codec.spill_ram == 0
    with pytest.raises(ConfigError, match=r"codec\.spill_ram is set, but nothing is spilled; name"):
        RunConfig().with_overrides(["codec.spill_ram=64MiB"]).validate()
    with pytest.raises(ConfigError, match=r"codec\.spill_ram"):
        RunConfig().with_overrides(["codec.spill_ram=lots"])


def test_a_corpus_below_one_batch_is_refused_with_both_numbers() -> None:
    config = RunConfig()

    with pytest.raises(ConfigError) as caught:
        check_corpus(config, 63)

    assert str(caught.value) == (
        "--data pydoc: makes 63 samples of 128 tokens, but one step takes 64 (4 micro-batches of "
        "16); use more of it (--set data.num_samples=64), or lower --micro-batches, "
        "--micro-batch-size or model.context."
    )
    check_corpus(config, 64)


def test_a_corpus_of_which_a_part_is_used_is_to_be_used_more(tmp_path: Path) -> None:
    """`--micro-batches 32` alone: pydoc has thousands of samples, a first look takes 160."""
    whole = with_data(tmp_path / "book.txt")
    part = RunConfig(data=DataConfig(source="book.txt", num_samples=60), eval=True)

    with pytest.raises(ConfigError, match=r"16\); give more text, or lower --micro-batches"):
        check_corpus(whole, 63)
    with pytest.raises(ConfigError) as caught:
        check_corpus(part, 54)

    text = str(caught.value)
    assert "54 samples of 128 tokens to train on, without those that --eval keeps out" in text
    enough = int(re.findall(r"use more of it \(--set data.num_samples=(\d+)\)", text)[0])
    check_corpus(part, enough - held_out_samples(enough))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_dataset_below_one_batch_is_refused_by_its_own_name(replicas: int) -> None:
    config = RunConfig(sync=SyncConfig(replicas=replicas))
    expected = {
        1: "the dataset Waves has 63 samples, but one step takes 64 (4 micro-batches of 16); give "
        "more samples, or lower pipeline.micro_batches or pipeline.micro_batch_size.",
        2: "--replicas 2: each gets 50 of 100 samples, but one step takes 64 (4 micro-batches of "
        "16); give more samples, or lower --replicas, --micro-batches or --micro-batch-size.",
    }

    with pytest.raises(ConfigError) as caught:
        check_corpus(config, {1: 63, 2: 100}[replicas], dataset="Waves")

    assert str(caught.value) == expected[replicas]


# --- files and folders -----------------------------------------------------------------------


def with_data(source: Path) -> RunConfig:
    return RunConfig(data=DataConfig(source=str(source)))


def test_data_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 10)
    empty = tmp_path / "empty.txt"
    empty.touch()
    (tmp_path / "folder").mkdir()

    assert "there is no such file or folder" in refused(with_data(tmp_path / "none.txt"))
    assert "or pydoc for the text that comes with Python" in refused(with_data(tmp_path / "x"))
    message = refused(with_data(latin))
    assert "not UTF-8 text (byte 3 is 0xe9); convert it" in message
    assert "the file is empty" in refused(with_data(empty))
    assert "the folder holds no file" in refused(with_data(tmp_path / "folder"))


def test_good_data_passes_even_where_our_look_cuts_a_character(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a" + "é" * 40_000, encoding="utf-8")  # byte 65536 is inside a character

    assert with_data(text).validate() == []
    assert with_data(tmp_path).validate() == []


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    assert f"--out {file}: is a file; name a folder." in refused(RunConfig(out=str(file)))
    assert "--out" in refused(RunConfig(out=str(file / "below")))
    assert RunConfig(out=str(tmp_path / "a" / "b")).validate() == []
    assert not (tmp_path / "a").exists()


def test_a_home_folder_is_the_one_of_whoever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ray")

    assert RunConfig(out="~/runs").out == "/home/ray/runs"
    assert RunConfig(out="runs/~").out == "runs/~"
    assert CheckpointConfig(resume="~/runs/x").resume == "/home/ray/runs/x"
    assert CheckpointConfig(resume="auto").resume == "auto"


@pytest.mark.parametrize(
    "key",
    [
        "data.source",
        "codec.spill_dir",
        "network.topology",
        "checkpoint.dir",
        "faults.black_box",
        "embedding.spill",
        "embedding.rows",
    ],
)
def test_home_is_found_where_no_shell_has_looked_for_it(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """In files, submitted jobs and behind `--set key=`: a folder of the name ~ was made."""
    monkeypatch.setenv("HOME", "/home/ray")
    task = {"task": "ctr"} if key.startswith("embedding") else {}

    config = RunConfig.from_dict({**task, key: "~/here"})

    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == "/home/ray/here"


def test_a_folder_that_ray_will_remove_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)

    (text,) = RunConfig().validate()

    assert text.startswith(f"--out runs is {package}/runs, in Ray's own copy of --working-dir")
    assert RunConfig(out=str(tmp_path)).validate() == []


@pytest.mark.parametrize("key", ["out", "codec.spill_dir"])
def test_a_uri_is_not_taken_for_a_folder_of_that_name(key: str) -> None:
    """As Ray Train's storage_path may be: `./s3:/bucket` would be made without a word."""
    config = RunConfig().with_overrides([f"{key}=s3://bucket/runs"])

    with pytest.raises(ConfigError, match=r"s3://bucket/runs: is a URI, and .*--checkpoint-dir"):
        config.validate()


def test_an_output_folder_without_permission_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "runs" / "today")

    with pytest.raises(ConfigError) as caught:
        check_folder(out, flag="--out", may_write=lambda folder: folder != tmp_path)

    assert str(caught.value) == (
        f"--out {out}: cannot be written, {tmp_path} is not writable for this account; "
        "choose another folder with --out."
    )


def test_an_output_folder_on_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    """Root may write everywhere but there."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        for out in (tmp_path, tmp_path / "runs"):
            assert refused(RunConfig(out=str(out))) == (
                f"--out {out}: cannot be written, {tmp_path} is not writable for this account; "
                "choose another folder with --out."
            )
        with pytest.raises(ConfigError, match=r"cannot be made, Read-only file system; choose"):
            RunConfig(out=str(tmp_path), name="x").make_folder()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_topology_is_checked_against_the_stages(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("default: {bandwidth: 100Mbps}\nlinks:\n  0->5: {latency: 5ms}\n")
    config = RunConfig(network=NetworkConfig(topology=str(file)))

    message = refused(config)
    assert message.startswith("--topology: ")
    assert "net.yaml" in message
    assert "5" in message
    file.write_text("default: {bandwidth: 100Mbps}\nlinks:\n  0->1: {latency: 5ms}\n")
    assert config.validate() == []
    assert "--topology" in refused(RunConfig(network=NetworkConfig(topology="none.yaml")))


def test_a_bandwidth_that_the_topology_would_hide_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("default: {bandwidth: 100Mbps}\n")
    network = NetworkConfig(topology=str(file), bandwidth_bps=1e7)

    message = refused(RunConfig(network=network))

    assert "network.bandwidth_bps is 1e+07" in message
    assert "`bandwidth` under `default:`" in message


def test_settings_files_are_read_and_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"

    file.write_text("codec: {fw_bits: 2}\nnetwork:\n  bandwidth: 10Mbps\npipeline:\n")
    config = RunConfig.from_dict(read_settings(str(file)))
    assert (config.codec.fw_bits, config.network.bandwidth_bps) == (2, 10e6)

    file.write_text("")
    assert read_settings(str(file)) == {}
    for text, part in [
        ("codec: {fw_bits: 2\nx: 1", "line 2"),
        ("- 1", "holds a list instead of settings"),
        ("seed: 1\ncodec: {fw_bits: 2}\nseed: 3", "key 'seed' is given twice in line 3, column 1"),
        ("codec: {fw_bits: 2, fw_bits: 4}", "key 'fw_bits' is given twice in line 1, column 21"),
        ("\x00", "--config"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=part):
            read_settings(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_settings(str(file))
    with pytest.raises(ConfigError, match="cannot be read, No such file"):
        read_settings(str(tmp_path / "none.yaml"))


def test_what_a_file_merges_in_may_be_written_over(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("codec: {<<: {name: acsgd, fw_bits: 4}, fw_bits: 2}\n")
    assert read_settings(str(file))["codec"] == {"name": "acsgd", "fw_bits": 2}


def test_a_wrong_key_in_a_file_names_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_layers([("run.yaml", {"codec": {"fwbits": 2}})])

    assert str(caught.value).startswith("run.yaml, codec.fwbits: there is no option 'fwbits'")


def test_between_several_nodes_nothing_is_emulated_unless_it_is_asked_for() -> None:
    config, notes = RunConfig().on_nodes(4)

    assert config.network.unlimited
    assert config.name.startswith("compare-unlimited-")
    assert notes == [
        "the stages are on 4 nodes and no --bandwidth was given: frames go over the real network "
        "as they are, nothing is emulated (--bandwidth 100Mbps would)."
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"network.bandwidth": "100Mbps"},  # said aloud, though it is the default
        {"network.bandwidth_bps": 1e7},
        {"network": NetworkConfig(bandwidth_bps=100e6)},  # as from Python
    ],
)
def test_a_bandwidth_that_is_given_is_emulated_on_any_cluster(given: dict[str, Any]) -> None:
    asked = RunConfig(**given) if "network" in given else RunConfig.from_dict(given)
    config, notes = asked.on_nodes(4)

    assert config is asked
    assert notes == []


def test_on_one_node_the_default_bandwidth_is_emulated() -> None:
    config = RunConfig()

    same, notes = config.on_nodes(1)

    assert same == config
    assert notes == [
        "all stages are on one node and no --bandwidth was given: links of 100Mbps are emulated "
        "between them (--bandwidth unlimited: none)."
    ]
    asked = RunConfig(network=NetworkConfig(bandwidth_bps=1e7))
    assert asked.on_nodes(1) == (asked, [])


def test_what_was_not_given_is_still_not_given_after_an_override() -> None:
    config = RunConfig(name="mine").with_overrides(["codec.fw_bits=2"])

    assert not config.links_are_given
    assert config.on_nodes(2)[0].name == "mine"
    assert RunConfig().with_overrides(["network.bandwidth=100Mbps"]).links_are_given
    assert not pickle.loads(pickle.dumps(config)).links_are_given
