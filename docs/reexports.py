"""Extensions of griffe for the reference pages.

`FunctionsBeforeModules` lets them find `jaxdist.reducers.exact`, a function whose module has the same name;
`ExamplesAsCode` renders doctests as code.
"""

import re

from griffe import Alias, AliasResolutionError, Extension


class ExamplesAsCode(Extension):
    """Turns `Example:` into the section name of Google style, so that `[1][0]` in a doctest is no link."""

    def on_package(self, *, pkg, **kwargs):
        """Renames the section in every docstring of the package."""
        for member in _objects_below(pkg):
            if member.docstring is not None:
                text = re.sub(r"^( *)Example:$", r"\1Examples:", member.docstring.value, flags=re.MULTILINE)
                member.docstring.value = text


class FunctionsBeforeModules(Extension):
    """After `from .exact import exact as exact` Python's `reducers.exact` is that function; griffe takes the module."""

    def on_package(self, *, pkg, **kwargs):
        """Puts such functions in the place of such modules, in all of the package."""
        found = [
            (module, name, function)
            for module in [pkg, *_modules_below(pkg)]
            for name, member in module.members.items()
            if (function := _namesake(member)) is not None
        ]
        # Only now: names are looked up through modules, and a function has nothing below it.
        for module, name, function in found:
            module.members[name] = Alias(name, function, parent=module)


def _objects_below(parent):
    for member in parent.members.values():
        if not member.is_alias:
            yield member
            yield from _objects_below(member)


def _modules_below(package):
    for member in package.members.values():
        if not member.is_alias and member.is_module:
            yield member
            yield from _modules_below(member)


def _namesake(member):
    """The function of the same name inside a module, whether it is met directly or through an import."""
    try:
        target = member.final_target if member.is_alias else member
    except AliasResolutionError:  # from a library that is not documented here
        return None
    function = target.members.get(target.name) if target.is_module else None
    return function if function is not None and not function.is_alias and function.is_function else None
