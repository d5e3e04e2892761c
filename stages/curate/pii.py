"""`pii`: masking of personal data, and removal of documents that contain too much of it."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, PositiveInt

from puna.kernels.text.number_hints import hints
from puna.kernels.text.personal import find, mask, needed_hints
from puna.kernels.text.strings import buffers
from puna.stages.contract import MACHINE_ERRORS, Documents, StageConfig, StageRun, stage
from puna.storage.schemas import table_schema

Entity = Literal["email", "iban", "card", "ssn", "ip_address", "address", "phone"]
ALL: tuple[Entity, ...] = ("email", "iban", "card", "ssn", "ip_address", "address", "phone")


class PiiConfig(StageConfig):
    entities: tuple[Entity, ...] = Field(ALL, description="Kinds of personal data to mask")
    drop: dict[Entity, PositiveInt] = Field(default_factory=dict, description="Kind → number of pieces that drops a document: {ssn: 1}")
    code_sources: tuple[str, ...] = Field(("code",), description="Sources of program text, in which numbers are rarely personal")
    code_entities: tuple[Entity, ...] = Field(("email",), description="Kinds to mask in code_sources")
    max_text_bytes: int = Field(8 << 20, ge=1024, description="Maximum size of a document in UTF-8 bytes; larger ones are dropped")


@stage(kind="documents", filters="documents")
def pii(documents: Documents, config: PiiConfig, run: StageRun) -> None:
    """Mask e-mail and postal addresses, phone, card, bank account and social security numbers, and public IP addresses.

    A masked piece becomes `<EMAIL>`, `<ADDRESS>`, `<PHONE>`, `<CARD>`, `<IBAN>`, `<SSN>` or `<IP_ADDRESS>`; `scores` counts each document's
    masked pieces by kind. The rule `pii_KIND` drops documents with at least `drop[KIND]` pieces of a kind, masked or not. The rule
    `pii_failed` drops documents that are too long or whose search fails, since they may contain personal data."""
    run.transform(_mask, documents, config)


def _mask(documents: pa.Table, config: PiiConfig) -> dict[str, pa.Table]:
    ids, texts = documents.column("id"), documents.column("text")
    sizes = pc.binary_length(texts).to_numpy()
    in_code = np.asarray(pc.is_in(documents.column("source"), pa.array(config.code_sources, pa.string())))
    searched, searched_in_code = ((*wanted, *config.drop) for wanted in (config.entities, config.code_entities))
    seen = hints(*buffers(texts))
    keep, changed = np.ones(len(sizes), np.bool_), np.zeros(len(sizes), np.bool_)
    clean: list[str] = []
    scores: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    possible = seen & np.where(in_code, needed_hints(searched_in_code), needed_hints(searched)) != 0
    for row in np.flatnonzero(possible | (sizes > config.max_text_bytes)).tolist():
        identity = ids[row].as_py()
        if sizes[row] > config.max_text_bytes:
            keep[row] = False
            failure = {"id": identity, "rule": "pii_failed", "value": float(sizes[row]), "threshold": float(config.max_text_bytes)}
            dropped.append({**failure, "detail": "the text is too long to search, in bytes"})
            continue
        try:
            text = texts[row].as_py()
            spans = find(text, searched_in_code if in_code[row] else searched, int(seen[row]))
        except MACHINE_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - any error drops only its own document
            keep[row] = False
            dropped.append({"id": identity, "rule": "pii_failed", "detail": f"{type(error).__name__}: {error}"})
            continue
        counts = Counter(span.entity for span in spans)
        over = next((kind for kind, limit in sorted(config.drop.items()) if counts[kind] >= limit), None)
        if over is not None:
            keep[row], limit = False, config.drop[over]
            detail = f"{counts[over]} of kind {over}; {limit} or more are dropped"
            dropped.append({"id": identity, "rule": f"pii_{over}", "value": counts[over], "threshold": limit, "detail": detail})
            continue
        entities = config.code_entities if in_code[row] else config.entities
        spans = [span for span in spans if span.entity in entities]
        if spans:
            changed[row] = True
            clean.append(mask(text, spans))
        for entity, count in sorted(Counter(span.entity for span in spans).items()):
            scores.append({"id": identity, "name": f"masked_{entity}", "value": float(count)})
    if clean:
        place = documents.schema.get_field_index("text")
        masks = pc.replace_with_mask(texts, pa.array(changed), pa.array(clean, texts.type))
        documents = documents.set_column(place, documents.schema.field(place), masks)
    return {
        "documents": documents if keep.all() else documents.filter(pa.array(keep)),
        "scores": pa.Table.from_pylist(scores, schema=table_schema("scores").schema),
        "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema),
    }
