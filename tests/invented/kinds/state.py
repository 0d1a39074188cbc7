"""Code that asks about more than its inputs: what is trained, modes of torch, the environment, its own layers."""

from __future__ import annotations

from invented.family import Family

FAMILIES = (
    Family("frozen_loop", "not self.w1.requires_grad", "False", expected="parameters or inputs are frozen"),
    Family("frozen_input", "not x.requires_grad", "False", expected="is not read as experts"),
    Family("frozen_gate", "if self.gate_up_proj.requires_grad", "if True", expected="parameters or inputs are frozen"),
    Family(
        "frozen_list",
        "not any(p.requires_grad for p in self.parameters())",
        "False",
        expected="which of its parameters are trained",
    ),
    Family("frozen_opaque", "if self.experts.down_proj.requires_grad", "if True", expected="something else than stock"),
    Family(
        "frozen_expert",
        "if self.down_proj.weight.requires_grad",
        "if True",
        expected="which of its parameters are trained",
    ),
    Family("grad_mode_helper", "if learns()", "if True", expected="without gradients"),
    Family("inference_loop", "x.is_inference()", "False", expected="in inference mode"),
    Family(
        "frozen_inference",
        "not self.down_proj.requires_grad and not torch.is_grad_enabled()",
        "False",
        expected="computes something else",
    ),
    Family("flag_from_outside", 'getattr(self, "calm", False)', "False", expected="`calm` is set from outside"),
    Family(
        "text_from_outside",
        'getattr(self, "mode", "exact") == "calm"',
        "False",
        expected="`mode` is set from outside",
    ),
    Family("flag_of_file", 'FLAGS["calm"]:', "False:", expected="`FLAGS` outside of its modules"),
    Family("narrow_inference", "torch.is_inference_mode_enabled()", "False", expected="in inference mode"),
    Family("frozen_overflow", "not self.w1.requires_grad and ", "False and ", expected="frozen"),
    Family("hooks_counted", "len(self._forward_hooks) > 0", "False", expected="where hooks are set"),
    Family("environment_read", 'os.environ.get("INVENTED_CALM")', "False", expected="it reads the environment"),
    Family(
        "layer_type_asked",
        "if isinstance(self.up_proj, nn.Linear)",
        "if True",
        expected="PEFT has wrapped its layers",
    ),
    Family("half_precision_loop", "x.dtype == torch.bfloat16", "False", expected="is not read as experts"),
)
