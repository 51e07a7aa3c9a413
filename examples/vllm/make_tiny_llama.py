"""Write a tiny random Llama with a byte tokenizer, for trying things out on a CPU.

Run it:  python examples/vllm/make_tiny_llama.py DIRECTORY

Its text means nothing, but its tokens depend on every token of the prompt: what attention finds outweighs the token
itself, and the layers behind amplify small differences. A cache with one wrong block shows up in the output.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 7
MAX_TOKENS = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(directory: Path) -> None:
    """Write model, configuration and tokenizer."""
    torch.manual_seed(SEED)
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=_std(name, weight.shape[1]))
    model.to(torch.float32).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(directory)


def _std(name: str, fan_in: int) -> float:
    """Standard deviation of one matrix; 1/sqrt(fan_in) keeps the scale of what goes through it."""
    neutral = 1 / math.sqrt(fan_in)
    if "q_proj" in name or "k_proj" in name:
        return neutral * 2.5
    if "v_proj" in name or "o_proj" in name:
        return neutral * 5
    if "mlp" in name:
        return neutral * 2
    return 1.0 if "embed_tokens" in name else neutral


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    directory = Path(sys.argv[1])
    make(directory)
    print(f"a tiny random Llama is in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
