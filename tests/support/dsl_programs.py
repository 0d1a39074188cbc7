"""Random syntax trees of the rule language, and random programs that check clean, for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ktc.language.dsl import syntax
from ktc.language.dsl.schema import KEYWORDS

_SHORT = {"min_size": 1, "max_size": 3}
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(lambda word: word not in KEYWORDS)
names = words.map(syntax.Name)
paths = st.lists(words, **_SHORT).map(tuple)
texts = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=12).map(syntax.Text)

literals = st.one_of(
    st.integers(0, 10**18 - 1).map(lambda n: syntax.Literal("int", n)),
    st.integers(0, 10**18 - 1).map(lambda n: syntax.Literal("size", n)),
    st.floats(0, 1e300, allow_nan=False).map(lambda x: syntax.Literal("float", x)),
    st.booleans().map(lambda b: syntax.Literal("bool", b)),
    texts.map(lambda text: syntax.Literal("string", text.value)),
    st.sampled_from(["cuda:0", "cuda:12"]).map(lambda device: syntax.Literal("device", device)),
)
_OPERATORS = ["or", "and", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "+", "-", "*", "/", "%"]


def _larger(expressions: st.SearchStrategy[syntax.Expression]) -> st.SearchStrategy[syntax.Expression]:
    return st.one_of(
        st.builds(syntax.Unary, st.sampled_from(["-", "not"]), expressions),
        st.builds(syntax.Binary, st.sampled_from(_OPERATORS), expressions, expressions),
        st.builds(syntax.Has, expressions, words),
        st.builds(syntax.RangeExpression, expressions, expressions),
        st.lists(expressions, max_size=3).map(lambda items: syntax.ListExpression(tuple(items))),
    )


expressions = st.recursive(
    st.one_of(literals, paths.map(syntax.Reference), words.map(syntax.ParamReference)), _larger, max_leaves=8
)
arguments = st.lists(st.builds(syntax.Argument, st.none() | words, expressions), max_size=3).map(tuple)
named_arguments = st.lists(st.builds(syntax.Argument, words, expressions), max_size=2).map(tuple)


def _larger_term(terms: st.SearchStrategy[syntax.Term]) -> st.SearchStrategy[syntax.Term]:
    some = st.lists(terms, max_size=3).map(tuple)
    infix = st.sampled_from([("add",), ("sub",), ("mul",), ("div",)])
    return st.one_of(
        st.builds(syntax.Call, paths, some, named_arguments),
        st.builds(syntax.Call, infix, st.tuples(terms, terms)),
        st.builds(syntax.Alternatives, st.lists(terms, min_size=2, max_size=3).map(tuple)),
        st.builds(syntax.Maybe, terms),
    )


uses = paths.filter(lambda parts: parts != ("_",)).map(syntax.Use)
terms = st.recursive(uses | st.just(syntax.Wildcard()), _larger_term, max_leaves=8)

qualified = paths.map(syntax.QualifiedName)
bindings = st.lists(st.builds(syntax.Binding, st.lists(names, **_SHORT).map(tuple), terms), **_SHORT).map(tuple)
actions = st.builds(syntax.Action, names, arguments, st.lists(qualified, max_size=2).map(tuple))
expectations = st.builds(syntax.Expect, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), literals)
type_names = st.builds(syntax.TypeName, names, st.none() | names)
keys = names | st.sampled_from(["cuda:0", "cuda:3"]).map(syntax.Name)
settings = st.lists(st.builds(syntax.Setting, keys, expressions), max_size=3).map(tuple)
some_texts = st.lists(texts, max_size=2).map(tuple)

declarations = st.one_of(
    st.builds(syntax.Import, texts, st.none() | names, arguments),
    st.builds(syntax.Param, names, type_names, literals, st.none() | literals),
    st.builds(syntax.Require, expressions, st.none() | texts),
    st.builds(
        syntax.Pattern,
        names,
        st.lists(names, max_size=2).map(tuple),
        st.lists(names, **_SHORT).map(tuple),
        st.none() | names,
        bindings,
    ),
    st.builds(
        syntax.Rule,
        name=names,
        overrides=st.lists(qualified, max_size=2).map(tuple),
        root=qualified,
        alias=st.none() | names,
        at=some_texts,
        except_=some_texts,
        where=st.none() | expressions,
        expect=st.none() | expectations,
        actions=st.lists(actions, **_SHORT).map(tuple),
    ),
    st.builds(syntax.Block, st.sampled_from(["plan", "lora"]), settings),
)
modules = st.lists(declarations, max_size=4).map(lambda found: syntax.Module("random.ktr", tuple(found)))

# Declarations that stand together in any selection and any order.
PARTS = (
    'import "std/moe.ktr"',
    'import "std/attention.ktr" as attn',
    "param split : int = $first + 3 in $first..60",
    "param first : int = 2",
    "param device : device = cuda:0",
    'require model.type in ["deepseek_v2", "deepseek_v3"] else "why"',
    "require model.layers > $split",
    "pattern wide(x) -> y { y = narrow(x) * narrow(x) }",
    "pattern narrow(x) -> y { y = silu(linear(x)) }",
    'rule low overrides all { match module as m at "model.layers.*" where m.layer < $split => place($device) }',
    'rule all { match module at "model.layers.*" => place(cpu) }',
    'rule experts { match moe.block at "model.layers.[3..].**" => cpu_moe() }',
    "rule first { match moe.block as m where m.layer < $first expect >= 0 => keep(kernel) on m.experts }",
    "rule wide { match wide as w expect >= 0 => keep(quant) }",
    'rule tune overrides lora.targets { match linear at "**.q_proj" => lora_linear(rank = 4) }',
    "rule latent { match attn.mla as a => mla_absorbed() => lora_linear on a.q, a.o }",
    'lora { rank = 8, targets = ["**.{q,k}_proj"] }',
    "plan { mode = train, cuda:0 = 22GiB }",
)
# The order of all parts but the plan, whose place says nothing either.
orders = st.permutations(PARTS)
