"""`ktc bench`: measure ktc beside its peers.

`requests` has a frozen dataclass per benchmark, from which its options follow; `moe`, `stream`, `decode`, `finetune`,
`generate` and `serve` measure one into a `report.Report`. Peers are in `benchmarks/peers` of a source checkout.
"""
