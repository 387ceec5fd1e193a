"""llama.cpp's own server on loopback with a model of random numbers, whose tokens are bytes. Prints its base URL first.

It says nonsense, but everything around the words is real: the interface, the template, the counting, the refusals. It
runs in the environment that scripts/model_servers.py makes.

Arguments: a folder for the model, the tokens of the context.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import gguf
import numpy
import xllamacpp

FOLDER, WINDOW = Path(sys.argv[1]), int(sys.argv[2])
NAME = "random"
#: Small enough for a millisecond a token.
LAYERS, WIDTH, HEADS, INNER = 2, 64, 4, 128
#: Without words in front of an answer: a form is enforced from there on, and words would have to fit it.
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


def write_model(path: Path) -> None:
    """A llama model with random weights and a token for each byte."""
    chance = numpy.random.default_rng(16)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(NAME)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(name, (chance.standard_normal(shape) * 0.3).astype(numpy.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, numpy.ones(WIDTH, dtype=numpy.float32))

    weights("token_embd.weight", len(tokens), WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"blk.{layer}.{part}.weight", WIDTH, WIDTH)
        ones(f"blk.{layer}.ffn_norm.weight")
        weights(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
        weights(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
        weights(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    ones("output_norm.weight")
    weights("output.weight", len(tokens), WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    model = FOLDER / "random.gguf"
    if not model.exists():
        write_model(model)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {NAME}
    params.n_ctx = WINDOW
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.warmup = False
    params.use_jinja = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


main()
