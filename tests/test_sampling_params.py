"""The sampler's parameters and state: checks on the host, arrays without a compile."""

import jax
import numpy as np
import pytest

from minfer_jax.sampling import SamplingParams, init_state


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) == (1.1, 0, 0)
    assert params.seed == 42


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
    ],
)
def test_edge_values_are_taken(field: str, value: object):
    args = SamplingParams(**{field: value}).arrays(2)  # pyright: ignore[reportArgumentType]
    if field == "top_k":
        np.testing.assert_array_equal(args.top_k, [min(int(value), 2**31 - 1)] * 2)  # pyright: ignore
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
    assert compiled == []
    assert {a.shape for a in jax.tree.leaves(args)} == {(3,)}
    assert args.top_k.dtype == np.int32 and args.temperature.dtype == np.float32
    assert [state.recent.shape, state.key.shape, state.step.shape] == [(1, 64), (1, 2), (1,)]
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
