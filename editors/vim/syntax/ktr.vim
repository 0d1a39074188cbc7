" Vim syntax of ktc rule files. Made by `python -m ktc.language.dsl.vim_syntax`: do not edit.
if exists("b:current_syntax") | finish | endif
syntax case match
syntax keyword ktrDeclaration import lora param pattern plan require rule
syntax keyword ktrControl as at else except expect is match on overrides where with
syntax keyword ktrLogic and has in not or
syntax keyword ktrBoolean false true
syntax match ktrConstant +\.\@<!\<\%(up\|uint4_g64\|uint4_g32\|uint4_g128\|train\|torch\|swiglu_oai\|stored\|slime\|sign\|shard\|serve\|scale_first\|scalar\|relu2\|recompute\|quant\|q8_0\|q6_k\|q5_k\|q4_k\|q4_1\|q4_0\|prefill\|place\|packed\|off\|nvfp4\|none\|never\|mxfp4\|merged\|kernel\|keep\|intensity\|int8\|int4\|int32x8\|infer\|head\|group\|generate\|gemv\|gelu_tanh\|gate\|fp8\|fp32\|fp16\|flash_decode\|fixed\|f64\|f32\|f16\|down\|decode\|cpu\|bf16\|base\|avx512_bf16\|avx512\|avx2\|auto\|amx\|always\|adaptive\|adapter\)\>+
syntax match ktrTarget +\%(=>\s*\)\@<=\<\%(train\|sparse_attention\|quantize\|place\|mla_absorbed\|lora_linear\|lora_experts\|kt_linear\|keep\|gpu_moe\|fused_attention\|fused\|fake_quant\|cpu_moe\)\>+
syntax match ktrCall +\<\%(zeros_like\|weight\|topk\|tanh\|sum\|sub\|stack\|sqrt\|split\|sort\|softplus\|softmax\|slice\|silu\|sigmoid\|select\|sdpa\|scatter\|rsqrt\|rope\|rms_norm\|relu\|recurrence\|pow\|ones_like\|one_hot\|norm\|neg\|mul\|mean\|max\|matmul\|masked_fill\|lt\|logical_not\|log_softmax\|log\|linear\|le\|layer_norm\|index\|gt\|gelu\|ge\|gather\|from\|experts\|exp\|every\|eq\|embedding\|div\|cumsum\|conv1d\|const\|clamp_min\|clamp_max\|clamp\|chunk\|cat\|amax\|add\)\>\ze\s*(+
syntax match ktrDevice +\<\%(cuda\):\d\++
syntax match ktrNumber +\<\d\+\%(\.\d\+\)\?\%([eE][+-]\?\d\+\)\?\%( \?[KMGT]\?i\?B\)\?\>+
syntax match ktrVariable +\$[A-Za-z_]\w*+
syntax region ktrString start=+"+ skip=+\\["\\]+ end=+"+ oneline
syntax match ktrComment +#.*$+
highlight default link ktrDeclaration Statement
highlight default link ktrControl Keyword
highlight default link ktrLogic Operator
highlight default link ktrBoolean Boolean
highlight default link ktrConstant Constant
highlight default link ktrComment Comment
highlight default link ktrString String
highlight default link ktrVariable Identifier
highlight default link ktrDevice Constant
highlight default link ktrNumber Number
highlight default link ktrTarget Function
highlight default link ktrCall Function
let b:current_syntax = "ktr"
