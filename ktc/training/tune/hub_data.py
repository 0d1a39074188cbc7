"""A data set of the Hugging Face hub, read by `datasets`, which runs no code of a data set.

In: its name, perhaps with a configuration and a split. Out: its rows, numbered from 1. Refused (T546): a data set, a
configuration or a split that cannot be fetched or does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.training.tune.data_files import Rows, without_nulls
from ktc.training.tune.data_sources import HUB_WORDS, HubName
from ktc.training.tune.packages import require_packages

_SECONDS: Final = 15.0  # for an answer of the hub
_OFFLINE: Final = "check the connection, or fetch the data elsewhere and name its files: `--data 'folder/*.parquet'`"


def read_hub_rows(named: HubName) -> Rows:
    """Yield each row with its number, as `data_files.read_rows` does. Raises InputRefused (T546)."""
    require_packages("datasets")
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    _require_reachable(named)
    try:
        # Only data is loaded: `datasets` 4 and newer runs no scripts of data sets.
        rows = cast("Any", datasets).load_dataset(named.name, named.config, split=named.split)
        for number, row in enumerate(cast("list[Mapping[str, Any]]", rows), start=1):
            yield number, without_nulls(dict(row))
    except (ConnectionError, DatasetNotFoundError) as error:
        raise _refused(named, f"cannot be fetched from the hub ({type(error).__name__})", _OFFLINE) from error
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        # Another configuration or split, data of no known kind, or damaged data.
        said = str(error).strip().partition("\n")[0]
        raise _refused(named, f"is not read by `datasets`: {said:.300}", HUB_WORDS) from error


def _require_reachable(named: HubName) -> None:
    """Ask the hub once, because `datasets` tries for half a minute without a connection."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        huggingface_hub.HfApi().dataset_info(named.name, timeout=_SECONDS)
    except OfflineModeIsEnabled:
        return  # `datasets` looks into its cache
    except (HfHubHTTPError, HFValidationError) as error:
        hint = "check its name; a gated data set needs `hf auth login`, and local data the path of a file"
        raise _refused(named, f"is not on the hub, or not open to you ({type(error).__name__})", hint) from error
    except Exception as error:
        raise _refused(named, f"cannot be fetched from the hub ({type(error).__name__})", _OFFLINE) from error


def _refused(named: HubName, why: str, hint: str) -> InputRefused:
    return InputRefused(Diagnostic("T546", f"the data set `{named.name}` {why}", hint=hint))
