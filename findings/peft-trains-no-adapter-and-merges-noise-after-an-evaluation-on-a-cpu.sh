#!/bin/sh
# An evaluation on a CPU stops the training of adapters on 4-bit weights, and spoils their merge.
#
# Versions: bitsandbytes 0.50.2, peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11.
#
# Guess: an evaluation without gradients between two steps of QLoRA changes no gradient, and
# `merge_and_unload()` and `dequantize()` give the same weights before and after it.
#
# Seen: on CPUs with AVX512-BF16, a forward in eval mode packs each 4-bit weight for a kernel, for
# good. That kernel is used in training mode from then on and has no backward: all adapters have the
# gradient None at the next step, with a warning of autograd alone. `dequantize_4bit`, which PEFT and
# Transformers call, takes the packed numbers for those in the old order: the weights of
# `model.dequantize()` have a relative error of 1.43 instead of 0.09, with double quantization as
# without, and a merged model gives other logits. `state_dict()` in between puts the numbers back.
# A CPU without these instructions packs here by the function that the layer calls, and does not train.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 peft==0.21.2 \
    transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY' 2> "$folder/log"
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, has_avx512bf16
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
original = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).to(torch.bfloat16)
original.save_pretrained("model")
tokens = torch.arange(16)[None]


def load(double):
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    return AutoModelForCausalLM.from_pretrained("model", quantization_config=packing, device_map="cpu")


def adapt(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@torch.no_grad()
def evaluate(model):
    if has_avx512bf16():
        model.eval()(tokens)
        return
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            weight = layer.weight
            weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)


def distance(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


for double in (False, True):
    merged = []
    for evaluates in (False, True):
        trained, plain, tuned = adapt(load(double)), load(double), adapt(load(double))
        for model in (trained, plain, tuned) if evaluates else ():
            evaluate(model)
        name = "model.layers.0.mlp.up_proj.weight"
        error = distance(plain.dequantize().get_parameter(name), original.get_parameter(name))
        with torch.no_grad():
            merged.append(tuned.merge_and_unload().eval()(tokens).logits)
        print(f"double quantization {double}, evaluated {evaluates}: error of dequantize() {error:.2f}")
        assert (error > 1.3) == evaluates and (error < 0.1) != evaluates
        if has_avx512bf16():
            trained.train()(input_ids=tokens, labels=tokens).loss.backward()
            adapters = [p for key, p in trained.named_parameters() if "lora_B" in key]
            without = sum(parameter.grad is None for parameter in adapters)
            print(f"   adapters without a gradient: {without} of {len(adapters)}")
            assert without == (len(adapters) if evaluates else 0)
    apart = distance(merged[1], merged[0])
    print(f"   distance of the logits after both merges: {apart:.2f}")
    assert apart > 0.3
PY
