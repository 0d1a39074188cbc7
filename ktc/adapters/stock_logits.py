"""A program that `export_check` runs: the logits of an adapter in stock peft, and those of the model with it merged.

In: three folders, the base, the base with the adapter added to its weights, and the adapter. Out, on stdout: one JSON
object. ktc cannot be imported here: the comparison is of transformers and peft without changes of ktc.
"""

from __future__ import annotations

import json
import sys
from typing import Any, cast


def main(base: str, merged: str, adapter: str) -> None:
    cast("dict[str, Any]", sys.modules)["ktc"] = None

    import peft
    import torch
    import transformers

    torch.set_num_threads(1)

    def load(folder: str) -> Any:
        named = (cast("Any", transformers.AutoConfig).from_pretrained(folder).architectures or [""])[0]
        model_class = getattr(transformers, named, transformers.AutoModelForCausalLM)
        model = cast("Any", model_class).from_pretrained(folder, dtype=torch.float32)
        return model.eval()

    def logits(model: Any) -> torch.Tensor:
        ids = torch.arange(3, 3 + 2 * 24).reshape(2, 24) % model.get_input_embeddings().weight.shape[0]
        with torch.no_grad():
            return cast("torch.Tensor", model(input_ids=ids).logits).double()

    original, wanted = logits(load(base)), logits(load(merged))
    model = cast("Any", peft.PeftModel).from_pretrained(load(base), adapter).eval()
    factors = [tensor.double() for name, tensor in model.named_parameters() if ".lora_" in name]
    result = {
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "difference": float((logits(model) - wanted).abs().max()),
        "effect": float((wanted - original).abs().max()),
        "scale": float(wanted.abs().max()),
        "squares": float(sum(tensor.square().sum() for tensor in factors)),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
