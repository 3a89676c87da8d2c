"""An extension of griffe: the reference pages find `jaxdist.compressors.cast`, the function, not its module."""

from griffe import Alias, AliasResolutionError, Extension


class FunctionsBeforeModules(Extension):
    """After `from .cast import cast as cast` Python's `compressors.cast` is that function; griffe takes the module."""

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
