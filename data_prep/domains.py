"""Search for the domains of an input before the preparation begins."""

from __future__ import annotations

import re
from collections.abc import Iterable

from data_prep.documents import Corpus, Problems, domain_key
from data_prep.manifest import match_domain
from megatron_ext.utils.errors import UserError

TRAIN_DOMAINS = ("CommonCrawl", "C4")
TEST_DOMAINS = ("ArXiv", "Github", "StackExchange", "Wikipedia", "Book")
"""SlimPajama's domains, the defaults: train on web crawls, test on the rest."""

FOLDER_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+-]*")
"""Domain names for which a folder can be created."""

UNNAMED = "\N{NULL}none"
"""Default domain while checking whether records name their domain. Users cannot give this name."""

MAX_LISTED = 30
"""Maximum number of domains listed in a message."""


def find_domains(corpus: Corpus, names: list[str], option: str) -> list[str]:
    """Return the requested domains in the corpus's own spelling.

    Documents are read until every name has been found, so that only a wrong name costs a complete pass.

    Args:
        corpus: corpus to read.
        names: domain names in any spelling.
        option: command-line option that contained the names.

    Raises:
        UserError: a name is unknown (the existing domains are listed), or there is no document.
    """
    found: dict[str, str | None] = {domain_key(name): None for name in names}
    missing, domain_list, last = len(found), DomainList(), None
    problems = Problems("skip")
    for document in corpus.documents(problems):
        if document.domain == last:
            continue
        last, key = document.domain, domain_key(document.domain)
        if found.get(key, last) is None:
            found[key] = last
            missing -= 1
        if not missing:
            return [name for name in found.values() if name is not None]
        domain_list.add(last)
    if last is None:
        raise no_documents_error(corpus, problems)
    unknown = next(name for name in names if found[domain_key(name)] is None)
    skipped = f"; {problems.counts.total():,} records could not be read" if problems.counts else ""
    hint = f"choose from the domains of the input: {domain_list}{skipped}"
    raise UserError(option, f"unknown domain {unknown}", hint)


def require_any_domain(corpus: Corpus, names: Iterable[str]) -> None:
    """Raise unless an input has at least one of the given domains. Reading stops at the first document of one.

    Raises:
        UserError: the input has none of the given domains.
    """
    keys = {domain_key(name) for name in names}
    domain_list, problems = DomainList(), Problems("skip")
    for document in corpus.documents(problems):
        if domain_key(document.domain) in keys:
            return
        domain_list.add(document.domain)
    if not domain_list.names:
        raise no_documents_error(corpus, problems)
    problem = f"is not given, and the input has none of the default domains {', '.join(names)}"
    raise UserError("--train-domains", problem, f"choose from the domains of the input: {domain_list}")


def has_domain_names(corpus: Corpus, problems: Problems) -> bool:
    """Return True if the first well-formed record of an input names its domain.

    Args:
        corpus: corpus opened with `UNNAMED` as the default domain.
        problems: receives the malformed records before the first well-formed record.

    Raises:
        UserError: a record is malformed and `problems` stops, or no record is well-formed.
    """
    for document in corpus.documents(problems):
        return document.domain != UNNAMED
    raise no_documents_error(corpus, problems)


def folder_name(name: str) -> str:
    """Return a valid domain name that is similar to a name."""
    return re.sub(r"[^A-Za-z0-9_ .+-]", "_", name).lstrip(" .+-") or "corpus"


def resolve_domains(train: list[str] | None, test: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the given training and test domains. If a list is None, it is the defaults without the other list's."""
    default_train = [name for name in TRAIN_DOMAINS if not match_domain(name, test or [])]
    default_test = [name for name in TEST_DOMAINS if not match_domain(name, train or [])]
    return (default_train if train is None else train), (default_test if test is None else test)


def no_documents_error(corpus: Corpus, problems: Problems) -> UserError:
    """Return the error for an input without a well-formed record.

    If all records have the same kind of defect, it is the first record's error. Otherwise it contains the counts by
    kind.
    """
    counts: dict[str, int] = {}
    for (_, reason), number in problems.counts.items():
        counts[reason] = counts.get(reason, 0) + number
    if len(counts) == 1:
        try:
            for _ in corpus.documents(Problems("stop", alternative="give another --input")):
                break
        except UserError as error:
            return error
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.items(), key=lambda item: -item[1]))
    return UserError("--input", f"contains no readable record ({reasons or 'it is empty'})", "give another input")


class DomainList:
    """Domain names for a message, limited in number."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str) -> None:
        """Add a name, unless there are more than `MAX_LISTED` names already."""
        if len(self.names) <= MAX_LISTED:
            self.names.add(name)

    def __str__(self) -> str:
        shown = sorted(self.names)
        return ", ".join([*shown[:MAX_LISTED], "..."] if len(shown) > MAX_LISTED else shown)
