"""The sampler's parameters and state: checks on the host, arrays without a compile."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from minfer_jax.sampling import (
    SAMPLERS,
    SamplerArgs,
    SamplingParams,
    init_state,
    samplers_from,
)
from minfer_jax.sampling.order import STEPS


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, 0, 0)
    assert params.seed == 42
    assert params.steps == ("penalties", "top_k", "top_p", "min_p", "temperature")
    assert not params.extended


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1.0, "temperature must be >= 0 and finite, got -1.0"),
        ("temperature", float("nan"), "temperature must be >= 0 and finite, got nan"),
        ("temperature", float("inf"), "temperature must be >= 0 and finite, got inf"),
        ("temperature", 1e39, "temperature must be >= 0 and finite, got 1e+39"),
        (
            "temperature",
            10**999,
            "temperature must be >= 0 and finite, got an integer of 3319 bits",
        ),
        ("temperature", True, "temperature must be >= 0 and finite, got True"),
        ("temperature", "0.8", "temperature must be >= 0 and finite, got '0.8'"),
        ("temperature", None, "temperature must be >= 0 and finite, got None"),
        ("repeat_penalty", -0.1, "repeat_penalty must be >= 0 and finite, got -0.1"),
        ("top_p", float("nan"), "top_p must be a finite number, got nan"),
        ("min_p", -float("inf"), "min_p must be a finite number, got -inf"),
        ("frequency_penalty", [1.0], r"frequency_penalty must be a finite number, got [1.0]"),
        ("presence_penalty", -1e39, "presence_penalty must be a finite number, got -1e+39"),
        ("top_k", -1, "top_k must be an integer >= 0 (0 turns it off), got -1"),
        ("top_k", 40.0, "top_k must be an integer >= 0 (0 turns it off), got 40.0"),
        ("top_k", False, "top_k must be an integer >= 0 (0 turns it off), got False"),
        ("typical_p", float("inf"), "typical_p must be a finite number, got inf"),
        ("top_n_sigma", "1", "top_n_sigma must be a finite number, got '1'"),
        ("xtc_probability", -0.1, "xtc_probability must be >= 0 and finite, got -0.1"),
        ("xtc_threshold", None, "xtc_threshold must be >= 0 and finite, got None"),
        ("dynatemp_range", -1, "dynatemp_range must be >= 0 and finite, got -1"),
        ("dry_base", 1e39, "dry_base must be >= 0 and finite, got 1e+39"),
        ("dry_allowed_length", -1, "dry_allowed_length must be an integer >= 0, got -1"),
        (
            "penalty_last_n",
            1025,
            "penalty_last_n must be an integer from -1 to 1024 (0 turns it off, -1 is all), "
            "got 1025",
        ),
        (
            "dry_penalty_last_n",
            -2,
            "dry_penalty_last_n must be an integer from -1 to 1024 (0 turns it off, -1 is all), "
            "got -2",
        ),
        ("mirostat", 3, "mirostat must be 0 (off) or 2, got 3"),
        ("mirostat", 1, "mirostat must be 0 (off) or 2, got 1: version 1 is not supported"),
        ("mirostat_tau", float("nan"), "mirostat_tau must be >= 0 and finite, got nan"),
        ("samplers", ["top_k"], "samplers must be a tuple of names, got list"),
        ("samplers", ("top_k", "top_k"), "samplers has 'top_k' twice: a step runs once"),
        (
            "samplers",
            ("top_k", "tfs"),
            "samplers has 'tfs': expected names of penalties, dry, top_n_sigma, top_k, typ_p, "
            "top_p, min_p, xtc, temperature, joined by ';', or letters of 'edskypmxt'",
        ),
        ("seed", -1, "seed must be an integer from 0 to 2**64 - 1, got -1"),
        ("seed", 2**64, "seed must be an integer from 0 to 2**64 - 1, got 18446744073709551616"),
        ("seed", "x" * 99, "seed must be an integer from 0 to 2**64 - 1, got '" + "x" * 56 + "..."),
    ],
)
def test_bad_values_are_named(field: str, value: object, message: str):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", 10**30),
        ("top_k", np.int64(7)),
        ("top_p", 2.0),
        ("top_p", -1.0),
        ("min_p", 1.5),
        ("repeat_penalty", 0.5),
        ("frequency_penalty", -2.0),
        ("presence_penalty", -2),
        ("seed", 2**64 - 1),
        ("typical_p", 2.0),
        ("top_n_sigma", -7.0),
        ("dry_allowed_length", 10**30),
        ("dry_penalty_last_n", 1024),
        ("penalty_last_n", -1),
    ],
)
def test_edge_values_are_taken(field: str, value: object):
    params = SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]
    extended = params.extended_arrays(2, bias=np.zeros(3, np.float32))
    args = extended.usual if field in SamplerArgs.__dataclass_fields__ else extended
    assert jax.tree.all(jax.tree.map(np.array_equal, params.arrays(2), extended.usual))
    if field in ("top_k", "dry_allowed_length", "dry_penalty_last_n", "penalty_last_n"):
        expected = [min(int(value), 2**31 - 1)] * 2  # pyright: ignore[reportArgumentType]
        np.testing.assert_array_equal(getattr(args, field), expected)
    elif field != "seed":
        np.testing.assert_array_equal(getattr(args, field), np.float32([value] * 2))  # pyright: ignore


def test_arrays_and_state_have_one_row_each_and_compile_nothing():
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    args = SamplingParams(temperature=0.3).arrays(3)
    state = init_state(SamplingParams(), list(range(100)))
    bias = np.zeros(40, np.float32)
    extended = SamplingParams(dry_multiplier=0.5).extended_arrays(3, bias=bias, n_vocab=39)
    assert compiled == []
    assert extended.usual.n_vocab.tolist() == [39] * 3 and args.n_vocab.tolist() == [2**31 - 1] * 3
    shapes = {"order": (11,), "bias": (40,), "breakers": (2,)}
    for field in dataclasses.fields(extended):
        if field.name != "usual":
            assert getattr(extended, field.name).shape == shapes.get(field.name, (3,))
    assert {a.shape for a in jax.tree.leaves(args)} == {(3,)}
    assert args.top_k.dtype == np.int32 and args.temperature.dtype == np.float32
    assert [state.recent.shape, state.key.shape, state.step.shape] == [(1, 64), (1, 2), (1,)]
    assert state.mu.tolist() == [10.0]
    jax.jit(lambda x: x * 3)(args.min_p)
    assert compiled != []  # the listener does hear of compiles


@pytest.mark.parametrize("prompt", [[], [5], list(range(64)), np.arange(1000)])
def test_window_holds_the_tail_of_the_prompt(prompt: list[int]):
    recent = np.asarray(init_state(SamplingParams(), prompt).recent)[0]
    tail = list(prompt)[-64:]
    assert recent.tolist() == [-1] * (64 - len(tail)) + tail


def test_key_is_jaxs_own_for_the_seed():
    for seed in (0, 42, 2**32 - 1):
        expected = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        state = init_state(SamplingParams(seed=seed), [])
        np.testing.assert_array_equal(state.key[0], expected)
    state = init_state(SamplingParams(seed=5 * 2**32 + 7), [])
    assert np.asarray(state.key).tolist() == [[5, 7]]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"temperature": 0.0}, "penalties"),
        ({"temperature": 0.0, "typical_p": 0.5, "samplers": ("typ_p", "penalties")}, "penalties"),
        ({"temperature": 0.0, "mirostat": 2, "repeat_penalty": 1.0}, ""),
        ({"samplers": ("top_k", "temperature")}, "top_k temperature"),
        ({"samplers": ()}, ""),
        ({"penalty_last_n": 0, "top_p": 1.0, "min_p": 0.0}, "top_k temperature"),
        ({"typical_p": 1.0, "top_n_sigma": 0.0, "xtc_threshold": 0.3, "top_k": 0}, None),
        ({"dry_base": 1.2, "dry_allowed_length": 5, "mirostat_tau": 3.0}, None),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": 0}, None),
        ({"dynatemp_range": 0.5, "samplers": ("top_k",)}, "top_k"),
        # Swapped, but one of the two is off.
        ({"samplers": ("top_p", "top_k"), "top_k": 0}, "top_p"),
    ],
)
def test_the_usual_chain_is_enough(values: dict, steps: str | None):
    params = SamplingParams(**values)
    assert not params.extended
    assert steps is None or params.steps == tuple(steps.split())


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"typical_p": 0.5}, "penalties top_k typ_p top_p min_p temperature"),
        ({"top_n_sigma": 1.0, "top_k": 0}, "penalties top_n_sigma top_p min_p temperature"),
        ({"xtc_probability": 0.1}, "penalties top_k top_p min_p xtc temperature"),
        ({"dry_multiplier": 1.0, "temperature": 0.0}, "penalties dry"),
        ({"dynatemp_range": 0.5}, None),
        ({"penalty_last_n": -1}, None),
        ({"penalty_last_n": 63}, None),
        ({"mirostat": 2}, "penalties temperature mirostat"),
        ({"mirostat": 2, "samplers": ("top_k",)}, "temperature mirostat"),
        ({"samplers": ("temperature", "top_k")}, "temperature top_k"),
    ],
)
def test_the_extended_chain_is_needed(values: dict, steps: str | None):
    params = SamplingParams(**values)
    assert params.extended
    assert steps is None or params.steps == tuple(steps.split())
    order = params.extended_arrays(bias=np.zeros(4, np.float32)).order.tolist()
    assert [STEPS[i] for i in order if i >= 0] == list(params.steps) and order[-1] == -1


def test_steps_that_are_not_listed_are_off_in_the_usual_arrays():
    args = SamplingParams(samplers=("top_k",), frequency_penalty=1.0).arrays()
    assert (args.top_k.item(), args.top_p.item(), args.min_p.item()) == (40, 1.0, 0.0)
    assert args.temperature.item() == 1.0
    assert (args.repeat_penalty.item(), args.frequency_penalty.item()) == (1.0, 0.0)
    off = SamplingParams(penalty_last_n=0, presence_penalty=1.0).arrays()
    assert (off.repeat_penalty.item(), off.presence_penalty.item()) == (1.0, 0.0)
    # Asked for the likeliest, that is what one gets.
    assert SamplingParams(samplers=("top_k",), temperature=0.0).arrays().temperature.item() == 0
    mirostat = SamplingParams(samplers=("top_k",), mirostat=2, temperature=0.5)
    assert mirostat.arrays().temperature.item() == 0.5


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("edskypmxt", SAMPLERS),
        ("kt", ("top_k", "temperature")),
        ("top_k;temperature", ("top_k", "temperature")),
        (" Top-P ; temp;", ("top_p", "temperature")),
        ("temp", ("temperature",)),
        ("xtc", ("xtc",)),
        ("", ()),
    ],
)
def test_samplers_from(text: str, names: tuple[str, ...]):
    assert samplers_from(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kz", "samplers has 'z': expected names of penalties, dry"),
        ("top_k;tfs", "samplers has 'tfs': expected"),
        ("top_k;k", "samplers has 'k': expected"),
        ("kk", "samplers has 'top_k' twice"),
        ("x" * 9 + "\x00" * 99, "samplers has 'xtc' twice"),
    ],
)
def test_unknown_samplers_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        samplers_from(text)


def test_parameters_survive_json():
    params = SamplingParams(
        top_k=np.int64(7),  # pyright: ignore[reportArgumentType]
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        samplers=("top_k", "temperature"),
        dry_penalty_last_n=-1,
        seed=2**64 - 1,
    )
    again = SamplingParams.from_plain(json.loads(json.dumps(params.plain())))
    assert again == params
    assert SamplingParams.from_plain({"top_k": 3}) == SamplingParams(top_k=3)  # an older file
    assert SamplingParams(top_k=10**30).plain()["top_k"] == 2**64 - 1
    for wrong in (
        {"samplers": [["top_k"]]},
        {"samplers": "top_k"},
        {"tfs": 1},
        [],
        None,
        {"top_k": "a"},
    ):
        with pytest.raises((ValueError, TypeError)):
            SamplingParams.from_plain(wrong)  # pyright: ignore[reportArgumentType]
