"""AWQ checkpoints: packed as AutoAWQ packs them, and read back exactly."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import CheckpointError, load, save
from puna.models.formats.families import unpack
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
GROUP = 16
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def pack(numbers):
    """Pack as AutoAWQ's WQLinear_GEMM.from_linear does: the i-th four bits of an int32 are column order_map[i] of eight."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for column in range(packed.shape[1]):
        for i in range(8):
            packed[:, column] |= numbers[:, 8 * column + order_map[i]].long() << (4 * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def quantized(folder):
    """Return a checkpoint with its layers' matrices packed, and the equivalent unpacked model."""
    model = Transformer(CONFIG, seed=0)
    generator = torch.Generator().manual_seed(1)
    save(model, folder)
    state = load_file(folder / "model.safetensors")
    for name, weight in list(state.items()):
        if "_proj" in name:
            N, D = weight.shape
            q = torch.randint(0, 16, (D, N), generator=generator)
            zeros = torch.randint(0, 16, (D // GROUP, N), generator=generator)
            scales = (torch.rand(D // GROUP, N, generator=generator) / 100).half()
            whole = torch.empty(N, D)
            for d in range(D):
                whole[:, d] = (q[d] - zeros[d // GROUP]) * scales[d // GROUP].float()
            model.get_parameter(name).data = whole
            del state[name]
            base = name.removesuffix("weight")
            state |= {f"{base}qweight": pack(q), f"{base}qzeros": pack(zeros), f"{base}scales": scales}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, SETTINGS)
    return model


def edit(folder, settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


def test_four_bits_by_hand():
    """0x75316420 has in bits 4 i to 4 i + 3 the outputs 0, 2, 4, 6, 1, 3, 5, 7: unpacked, they count from 0 to 7; 15 sets the sign bit."""
    assert unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [list(range(8))]
    assert unpack(torch.tensor([[-1, -(1 << 28)]], dtype=torch.int32)).tolist() == [[15] * 8 + [0] * 7 + [15]]


def test_a_checkpoint_is_read_to_the_number(tmp_path):
    model = quantized(tmp_path)
    found = load(tmp_path)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in model.state_dict().items())
    row = Forest.pack([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        torch.testing.assert_close(found.logits(found.hidden(row)), model.logits(model.hidden(row)), rtol=0, atol=0)
    assert load(tmp_path, dtype=None).model.layers[0].mlp.up_proj.weight.dtype == torch.float16
    save(found, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize(("name", "value"), [("quant_method", "gptq"), ("bits", 8), ("version", "gemv"), ("zero_point", False)])
def test_other_layouts_are_refused_by_name(tmp_path, name, value):
    quantized(tmp_path)
    edit(tmp_path, {**SETTINGS, name: value})
    with pytest.raises(CheckpointError, match=rf"quantization_config.{name} = {value!r} is not supported"):
        load(tmp_path)


def test_parts_that_lack_or_do_not_fit_are_named(tmp_path):
    quantized(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    place = "model.layers.1.mlp.down_proj."
    save_file({**state, f"{place}qzeros": state[f"{place}qzeros"][:1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.qweight \[48, 4\] torch.int32, zeros \[1, 4\] and scales \[3, 32\] do not fit"):
        load(tmp_path)
    for part, shape in (("scales", (0, 32)), ("scales", (32,)), ("qweight", (48,))):
        save_file({**state, f"{place}{part}": state[f"{place}{part}"].flatten()[: math.prod(shape)].view(shape)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"down_proj.qweight \[.* do not fit"):
            load(tmp_path)
    del state[f"{place}scales"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj.scales is missing"):
        load(tmp_path)
