"""Real shapes: matrices and heads of SmolLM2 135M, Gemma 3 270M, Mistral 7B and some others."""

from scripts.gpu_check.made import Heads

# (N, K): q | k | v, attention's output, gate | up, down, and the output layer where it is large.
SMOLLM2 = {"qkv": (960, 576), "attn_output": (576, 576), "up": (3072, 576), "down": (576, 1536)}
GEMMA3 = {
    "qkv": (1536, 640),
    "attn_output": (640, 1024),
    "up": (4096, 640),
    "down": (640, 2048),
    "output": (262144, 640),
}
MISTRAL_7B = {
    "qkv": (6144, 4096),
    "attn_output": (4096, 4096),
    "up": (28672, 4096),
    "down": (4096, 14336),
    "output": (32000, 4096),
}
ODD = {"odd": (100, 768)}  # N fills neither a tile nor a block
TINY = {"tiny": (48, 512)}

HEADS = {
    "SmolLM2": Heads(name="SmolLM2", n=9, k=3, h=64),
    "Gemma 3 270M": Heads(name="Gemma 3 270M", n=4, k=1, h=256),
    "Gemma 3 270M, sliding": Heads(name="Gemma 3 270M, sliding", n=4, k=1, h=256, window=512),
    "Mistral 7B": Heads(name="Mistral 7B", n=32, k=8, h=128),
    "Phi 3 mini": Heads(name="Phi 3 mini", n=32, k=32, h=96),
    "Gemma 2 2B": Heads(name="Gemma 2 2B", n=8, k=4, h=256, softcap=50.0),
    "gpt-oss, sliding": Heads(name="gpt-oss, sliding", n=64, k=8, h=64, window=128, sinks=True),
}
TINY_HEADS = Heads(name="tiny", n=4, k=2, h=32)


def label(shape: tuple[int, int]) -> str:
    """Such as "4096x14336"."""
    return "x".join(map(str, shape))
