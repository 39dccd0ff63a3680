import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer


@pytest.fixture
def tokens(tmp_path, tokenizer_file):
    """Folder with Megatron token files: one document of two sequences and one document of one."""
    encode = Tokenizer.from_file(str(tokenizer_file)).encode
    builder = IndexedDatasetBuilder(str(tmp_path / "Law_text_document.bin"), dtype=np.uint16)
    parts = [encode("first half, ").ids, [*encode("second half 東京").ids, 0]]
    builder.add_document(torch.tensor(parts[0] + parts[1]), [len(part) for part in parts])
    builder.add_document(torch.tensor(encode("another").ids), [len(encode("another").ids)])
    builder.finalize(str(tmp_path / "Law_text_document.idx"))
    return tmp_path
