"""Every step, and several orders of them, against what llama.cpp's samplers leave."""

import jax.numpy as jnp
import numpy as np
import pytest

from minfer_jax.sampling.dry import breaker_tokens
from minfer_jax.tokenizer import Tokenizer
from tests.helpers import sampler_reference as reference
from tests.helpers.make_sampler_golden import stored
from tests.helpers.sampler_cases import CASES, N_VOCAB
from tests.helpers.sampler_runs import draw_extended, given, left_by_extended
from tests.helpers.tiny_models import save, tiny_text_model

BREAKERS = {13, 37, 45, 61}  # the tokens of the bytes "\n", '"', "*" and ":"


@pytest.fixture(scope="module")
def golden() -> dict:
    return stored()


def test_all_cases_are_stored(golden: dict):
    assert golden.keys() == CASES.keys()


def test_breakers_of_the_vocabulary(tmp_path):
    tokenizer = Tokenizer.from_gguf(save(tmp_path, tiny_text_model()))
    words = breaker_tokens([tokenizer.token_bytes(i) for i in range(N_VOCAB)])
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits).tolist()) == BREAKERS


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_is_llama_cpps(name: str, golden: dict):
    case, p = CASES[name], CASES[name].params
    mu = 2 * p.mirostat_tau
    for turn in golden[name]:
        expected = np.zeros(N_VOCAB)
        expected[turn["ids"]] = turn["p"]
        textbook = reference.softmax(
            reference.by_order(case.logits, case.recent, p, BREAKERS, xtc_happens=True, mu=mu)
        )
        np.testing.assert_array_equal(textbook > 1e-30, expected > 1e-30)
        np.testing.assert_allclose(textbook, expected, rtol=2e-5, atol=1e-9)

        state, args = given(p, N_VOCAB, case.recent, BREAKERS, mu=mu)
        got, trusted = left_by_extended(jnp.asarray(case.logits)[None], state, args)
        if p.temperature >= 1e-6:
            assert bool(trusted[0])
            np.testing.assert_array_equal(np.asarray(got)[0] > 1e-30, expected > 1e-30)
            np.testing.assert_allclose(np.asarray(got)[0], expected, rtol=2e-4, atol=1e-9)
            few, trusted = left_by_extended(jnp.asarray(case.logits)[None], state, args, 40)
            if bool(trusted[0]):
                np.testing.assert_allclose(few, got, rtol=1e-5, atol=1e-9)

        token, after = draw_extended(jnp.asarray(case.logits)[None], state, args)
        assert expected[int(token[0])] > 0
        if p.mirostat:  # the bound follows what was drawn, here another token than there
            surprise = -np.log2(expected[[int(token[0]), turn["drawn"]]])
            bounds = mu - p.mirostat_eta * (surprise - p.mirostat_tau)
            np.testing.assert_allclose(after.mu, bounds[:1], rtol=1e-4)
            mu = float(bounds[1])
