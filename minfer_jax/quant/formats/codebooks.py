"""The values that integers stand for, as (zero, codebook): unsigned bytes, `zero` taken back."""

# Denser about zero (ggml-common.h: kvalues_iq4nl).
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_ZERO = 127
IQ4_CODEBOOK = tuple(IQ4_ZERO + value for value in _IQ4)


def _signed(values: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(zero, codebook) of up to 8 sizes, of which the flag gives the sign."""
    zero = max(values)
    padded = [*values, *[0] * (8 - len(values))]
    return zero, (*(zero + v for v in padded), *(zero - v for v in padded))


# Floats of 4 bits (E2M1, OCP Microscaling Formats specification 1.0), doubled to be whole.
E2M1_ZERO, E2M1_CODEBOOK = _signed((0, 1, 2, 3, 4, 6, 8, 12))

IQ2_ZERO, IQ2_CODEBOOK = _signed((8, 25, 43))
IQ3_ZERO, IQ3_CODEBOOK = _signed((4, 12, 20, 28, 36, 44, 52, 62))

# 8 (g + delta), g = -1, 0, 1: the flag gives delta's sign, 1/8 or -1/8.
IQ1_ZERO = 9
_IQ1 = (-8, 0, 8, 0, 0, 0, 0, 0)
IQ1_CODEBOOK = tuple(IQ1_ZERO + g + delta for delta in (1, -1) for g in _IQ1)
