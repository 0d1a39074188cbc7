"""Link: all results of a compilation -> the folder OUT, an importable package and a Hugging Face model folder."""

from __future__ import annotations

from ktc.model.manifest.out_place import check_out
from ktc.stages.link.adapter import adapter_json
from ktc.stages.link.assemble import assemble
from ktc.stages.link.package import KernelFile, Package, link
from ktc.stages.link.rules import rule_files
from ktc.stages.link.stages import dump_stage

__all__ = ["KernelFile", "Package", "adapter_json", "assemble", "check_out", "dump_stage", "link", "rule_files"]
