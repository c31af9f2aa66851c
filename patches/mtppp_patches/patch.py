"""What a patch is, and how patches are put in place: all that are needed, or none.

Verifying comes first and reads vLLM's source files: every attribute that any needed patch replaces
or leans on must have the fingerprint recorded for this release. Only then is anything replaced.
A module that vLLM has imported is patched at once, the others the moment they are imported, before
the importer sees them: no module is pulled into a process that would not have had it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.fingerprint import SourceNotFoundError, fingerprint
from mtppp_patches.releases import RELEASES

Replace = Callable[[Any, EngineSpec], Any]
"""Given the original attribute and the deployment, what takes its place."""


class PatchError(RuntimeError):
    """The engine cannot be patched as planned and must not run."""


@dataclass(frozen=True)
class Target:
    """One attribute of vLLM that a patch replaces or leans on.

    Attributes:
        module: "vllm.v1.worker.gpu.pp_utils".
        attribute: "PPHandler.receive"; the class must define it itself, not inherit it.
        replace: makes the replacement; None for what is only leaned on: its source must be the
            known one, but it stays.
        releases: the releases where this target exists; () means all those of its patch.
        families: the values of model_type that it matters to; () means all.
    """

    module: str
    attribute: str
    replace: Replace | None = None
    releases: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.module}:{self.attribute}"

    def exists_in(self, release: str) -> bool:
        """Whether `release`, one of its patch's, has it."""
        return not self.releases or release in self.releases


Scope = Literal["decode", "model", "deployment"]
"""What a patch is about: how drafts are decoded over stages, the same for every family; what one
family's model computes; or where and how the engine runs, which changes no token."""


@dataclass(frozen=True)
class Patch:
    """One fault of vLLM, mended.

    Attributes:
        name: how Plan, attestation and support.json call it.
        why: what goes wrong without it, in a sentence or two.
        releases: the releases it is for.
        obsolete_by: the upstream change and the release that make it unnecessary.
        wanted: whether a deployment on one of `releases` needs it; pure.
        targets: what it replaces and leans on. Two patches may wrap the same attribute: the later
            one in the registry gets the earlier one's replacement as its original.
        scope: decides what evidence it needs, see `support`.
    """

    name: str
    why: str
    releases: tuple[str, ...]
    obsolete_by: str
    wanted: Callable[[EngineSpec], bool]
    targets: tuple[Target, ...]
    scope: Scope = "model"

    @property
    def fate(self) -> str:
        """Until when it is needed, in words."""
        if RELEASES[-1] in self.releases:
            return f"still needed in {RELEASES[-1]}"
        return f"obsolete by {self.obsolete_by}"

    def needed(self, spec: EngineSpec) -> bool:
        """Whether `spec` must not run without this patch. Pure."""
        return spec.release in self.releases and self.wanted(spec)

    def targets_for(self, spec: EngineSpec) -> tuple[Target, ...]:
        """The targets that exist in the release of `spec` and matter to its model."""
        return tuple(
            target
            for target in self.targets
            if target.exists_in(spec.release)
            and (not target.families or spec.model_type in target.families)
        )


@dataclass(frozen=True)
class Applied:
    """One installed patch, for attestation.

    Attributes:
        targets: names ("module:attribute") replaced in this process.
        pending: those whose module this process has not imported; patched when it does.
    """

    name: str
    targets: tuple[str, ...]
    pending: tuple[str, ...]


def names_needed(patches: Iterable[Patch], spec: EngineSpec) -> tuple[str, ...]:
    """Names of the patches that `spec` needs, in order of application."""
    return tuple(patch.name for patch in patches if patch.needed(spec))


@cache
def known_fingerprints() -> Mapping[str, Mapping[str, str]]:
    """Target name -> release -> fingerprint, as recorded in fingerprints.json."""
    text = Path(__file__).with_name("fingerprints.json").read_text(encoding="utf-8")
    fingerprints: dict[str, dict[str, str]] = json.loads(text)
    return fingerprints


def verify(
    patch: Patch,
    spec: EngineSpec,
    package_root: Path,
    known: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Check that vLLM's sources are those that `patch` was written for.

    Args:
        package_root: the directory of the package vllm.
        known: fingerprints to compare with; those of fingerprints.json by default.

    Raises:
        PatchError: naming patch, attribute and release, and what to do.
    """
    fingerprints = known_fingerprints() if known is None else known
    advice = (
        f"Nothing was patched and the engine must not run. Use an unmodified vLLM {spec.release}, "
        "or a release that `mtppp patches` lists."
    )
    for target in patch.targets_for(spec):
        expected = fingerprints.get(target.name, {}).get(spec.release)
        if expected is None:
            raise PatchError(
                f"patch {patch.name}: no fingerprint of {target.name} is recorded for "
                f"vLLM {spec.release}. {advice}"
            )
        try:
            actual = fingerprint(package_root, target.module, target.attribute)
        except SourceNotFoundError as error:
            raise PatchError(
                f"patch {patch.name}, vLLM {spec.release}: {error}. {advice}"
            ) from None
        if actual != expected:
            raise PatchError(
                f"patch {patch.name}: the source of {target.name} is not the one of "
                f"vLLM {spec.release} (fingerprint {actual[:12]}, expected {expected[:12]}). "
                f"{advice}"
            )


@dataclass
class _Installation:
    """What this process has installed. One per process; see `install`."""

    spec: EngineSpec | None = None
    patches: tuple[Patch, ...] = ()
    replaced: dict[str, Any] = field(default_factory=dict)


_installation = _Installation()


def install(patches: Sequence[Patch], spec: EngineSpec, release: str, package_root: Path) -> None:
    """Verify all patches that `spec` needs, then put them in place. Idempotent.

    Args:
        patches: all patches there are.
        release: the release of the vLLM that runs.
        package_root: the directory of the package vllm.

    Raises:
        PatchError: another release runs than the launcher planned for, launcher and plugin
            disagree on the patches, or the sources are not the known ones. Nothing is replaced.
    """
    if _installation.spec is not None:
        if _installation.spec != spec:
            raise PatchError("this process was already patched for another deployment")
        return
    if release != spec.release:
        raise PatchError(
            f"vLLM {release} runs here but the deployment was planned for {spec.release}. "
            "Correct runtime.vllm in the cluster file, or the environment on this node."
        )
    needed = [patch for patch in patches if patch.needed(spec)]
    names = names_needed(patches, spec)
    if set(names) != set(spec.patches):
        raise PatchError(
            f"launcher and plugin disagree on the patches for vLLM {release}: the launcher planned "
            f"[{', '.join(sorted(spec.patches))}], the plugin finds [{', '.join(sorted(names))}]. "
            "They are of different versions of mtppp: launch again."
        )
    for patch in needed:
        verify(patch, spec, package_root)

    by_module: dict[str, list[Target]] = {}
    for patch in needed:
        for target in patch.targets_for(spec):
            if target.replace is not None:
                by_module.setdefault(target.module, []).append(target)
    for name, targets in by_module.items():
        if name in sys.modules:
            _require_originals(sys.modules[name], targets)
    sys.meta_path.insert(0, _PatchOnImport(by_module, spec))
    for name, targets in by_module.items():
        if name in sys.modules:
            _replace_all(sys.modules[name], targets, spec)
    _installation.spec, _installation.patches = spec, tuple(needed)


def applied() -> list[Applied]:
    """The patches installed in this process and what they have replaced so far."""
    spec = _installation.spec
    if spec is None:
        return []
    report = []
    for patch in _installation.patches:
        names = [target.name for target in patch.targets_for(spec) if target.replace is not None]
        report.append(
            Applied(
                patch.name,
                targets=tuple(name for name in names if name in _installation.replaced),
                pending=tuple(name for name in names if name not in _installation.replaced),
            )
        )
    return report


def displaced() -> list[str]:
    """Names of targets that something else replaced after we did."""
    found = []
    for name, replacement in _installation.replaced.items():
        module, attribute = name.split(":")
        owner, leaf = _owner(sys.modules[module], attribute)
        if getattr_static(owner, leaf) is not replacement:
            found.append(name)
    return found


class _PatchOnImport(MetaPathFinder):
    """Patches a module right after its code has run, before its importer gets it."""

    def __init__(self, by_module: Mapping[str, Sequence[Target]], spec: EngineSpec) -> None:
        self._by_module = by_module
        self._spec = spec

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        targets = self._by_module.get(fullname)
        if targets is None:
            return None
        found = self._found_by_others(fullname, path, target)
        if found is None or found.loader is None:
            return None
        loader: Loader = found.loader
        run = loader.exec_module

        def run_then_patch(module: ModuleType) -> None:
            run(module)
            _require_originals(module, targets)
            _replace_all(module, targets, self._spec)

        # The loader belongs to this one import; everything else about it stays as it was.
        loader.exec_module = run_then_patch  # type: ignore[method-assign]
        return found

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(fullname, path, target)):
                return found
        return None


def _require_originals(module: ModuleType, targets: Sequence[Target]) -> None:
    """The source on disk was verified; here, that the attribute in memory comes from it."""
    for target in targets:
        owner, leaf = _owner(module, target.attribute)
        try:
            original = getattr_static(owner, leaf)
        except AttributeError as error:
            raise PatchError(f"{target.name} does not exist although its source does") from error
        for source in _sources(original):
            # vLLM's and torch's own decorators wrap some of these.
            if not source.startswith(_roots_of("vllm", "torch")):
                raise PatchError(
                    f"{target.name} was already replaced by {source}: another plugin patches the "
                    "same attribute. Remove it, or name the plugins to load in VLLM_PLUGINS."
                )


def _sources(attribute: Any) -> Iterator[str]:
    """Files of a function and of everything it wraps."""
    layer = getattr(attribute, "__func__", attribute)
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is not None:
            yield code.co_filename
        layer = getattr(layer, "__wrapped__", None)


def _roots_of(*packages: str) -> tuple[str, ...]:
    """Directories of those packages that are installed."""
    found = [importlib.util.find_spec(package) for package in packages]
    return tuple(f"{Path(spec.origin).parent}/" for spec in found if spec and spec.origin)


def _replace_all(module: ModuleType, targets: Sequence[Target], spec: EngineSpec) -> None:
    for target in targets:
        assert target.replace is not None
        owner, leaf = _owner(module, target.attribute)
        original = getattr_static(owner, leaf)
        static = isinstance(original, staticmethod | classmethod)
        replacement = target.replace(original.__func__ if static else original, spec)
        replacement = type(original)(replacement) if static else replacement
        setattr(owner, leaf, replacement)
        _installation.replaced[target.name] = replacement


def _owner(module: ModuleType, attribute: str) -> tuple[Any, str]:
    *path, leaf = attribute.split(".")
    owner: Any = module
    for name in path:
        owner = getattr(owner, name)
    return owner, leaf


def vllm_root() -> Path:
    """The directory of the installed package vllm, without importing it.

    Raises:
        PatchError: there is none.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise PatchError("no vLLM is installed in this environment")
    return Path(next(iter(found.submodule_search_locations)))
