"""`pii`: personal data in documents is masked, and documents with too much of it are dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, PositiveInt

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.stages.curate.text.personal import find, masked
from puna.storage.schemas import table_schema

Entity = Literal["email", "iban", "card", "ssn", "ip_address", "address", "phone"]
ALL: tuple[Entity, ...] = ("email", "iban", "card", "ssn", "ip_address", "address", "phone")


class PiiConfig(StageConfig):
    """What is masked, and where."""

    entities: tuple[Entity, ...] = Field(ALL, description="Kinds of personal data that are masked")
    drop: dict[Entity, PositiveInt] = Field(
        default_factory=dict,
        description="Kind → number of pieces from which on the whole document is dropped, instead of masked: {ssn: 1, email: 50}",
    )
    code_sources: tuple[str, ...] = Field(("code",), description="Sources of program text, where numbers are rarely personal")
    code_entities: tuple[Entity, ...] = Field(("email",), description="Kinds that are masked in those sources")
    max_text_bytes: int = Field(
        8 << 20, ge=1024, description="Longer documents are dropped, bytes of UTF-8: the time that a search takes grows with the text"
    )


@stage(kind="documents", filters="documents")
def pii(documents: Documents, config: PiiConfig, run: StageRun) -> None:
    """Mask e-mail and postal addresses, phone, card, bank account and social security numbers and public IP addresses.

    A masked piece becomes `<EMAIL>`, `<ADDRESS>`, `<PHONE>`, `<CARD>`, `<IBAN>`, `<SSN>` or `<IP_ADDRESS>`; `scores` counts them
    per document. Documents with as many pieces of a kind as `drop` says go, by the rule `pii_KIND`, and those that cannot be
    searched or are too long for it, which nobody can call clean, by `pii_failed`.
    """
    run.transform(_mask, documents, config)


def _mask(documents: pa.Table, config: PiiConfig) -> dict[str, pa.Table]:
    """Masked documents of a part, how much was masked in each, and what was dropped."""
    texts: list[str] = []
    keep: list[bool] = []
    scores: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    columns = [documents.column(name).to_pylist() for name in ("id", "source", "text")]
    for identity, source, text, size in zip(*columns, pc.binary_length(documents.column("text")).to_pylist(), strict=True):
        if size > config.max_text_bytes:
            keep.append(False)
            texts.append("")
            row = {"id": identity, "rule": "pii_failed", "value": float(size), "threshold": float(config.max_text_bytes)}
            dropped.append({**row, "detail": "the text is too long to be searched, bytes"})
            continue
        wanted = config.code_entities if source in config.code_sources else config.entities
        try:
            spans = find(text, tuple({*wanted, *config.drop}))
        except Exception as error:  # noqa: BLE001 - one document may fail in any way, and the others go on
            keep.append(False)
            texts.append(text)
            dropped.append({"id": identity, "rule": "pii_failed", "detail": f"{type(error).__name__}: {error}"})
            continue
        counts = Counter(span.entity for span in spans)
        over = next((kind for kind, limit in sorted(config.drop.items()) if counts[kind] >= limit), None)
        keep.append(over is None)
        if over is not None:
            limit = config.drop[over]
            detail = f"{counts[over]} of kind {over}, dropped from {limit} on"
            dropped.append({"id": identity, "rule": f"pii_{over}", "value": counts[over], "threshold": limit, "detail": detail})
            texts.append(text)
            continue
        spans = [span for span in spans if span.entity in wanted]
        texts.append(masked(text, spans) if spans else text)
        for entity, count in sorted(Counter(span.entity for span in spans).items()):
            scores.append({"id": identity, "name": f"masked_{entity}", "value": float(count)})
    place = documents.schema.get_field_index("text")
    clean = documents.set_column(place, documents.schema.field(place), pa.array(texts, pa.string()))
    return {
        "documents": clean.filter(pa.array(keep, pa.bool_())),
        "scores": pa.Table.from_pylist(scores, schema=table_schema("scores").schema),
        "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema),
    }
