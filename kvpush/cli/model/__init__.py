"""The demo's model: a small Llama in plain torch that keeps its keys and values in a paged cache.

The cache is what the demo is about. Everything here serves one promise: tokens that a decode engine generates from
blocks which kvpush moved into it equal, one by one, those of a run that never left the prefill engine. So

* weights come from a seed alone (:meth:`Llama.from_seed`), or from a checkpoint (:meth:`Llama.from_hf`);
* attention reads keys and values only from the cache, gathered into token order first, so *which* blocks hold a
  sequence, and what lies in the rest of the cache, cannot reach the arithmetic;
* what a block holds, and its place in the sequence, do: one wrong block of one layer changes the text;
* every tensor that is computed on has a shape given by the tokens and their positions alone, because a matrix product
  may round differently at another shape. Hence the one condition: both runs cut the prompt into the same chunks.

Call :func:`deterministic` once in every process.
"""

from kvpush.cli.model.cache import OutOfBlocks, PagedKVCache, Span
from kvpush.cli.model.config import Llama3RopeScaling, ModelConfig
from kvpush.cli.model.llama import Llama, deterministic, generate, greedy, stream
from kvpush.cli.model.tokens import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "Llama",
    "Llama3RopeScaling",
    "ModelConfig",
    "OutOfBlocks",
    "PagedKVCache",
    "Span",
    "Tokenizer",
    "deterministic",
    "generate",
    "greedy",
    "stream",
]
