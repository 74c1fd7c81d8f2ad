"""Tests that a change can break, by imports: `make test-changed` runs these tests, for a developer's desk.

A node is a part of a file: its start (lines that run at an import), or a function, class or constant by name. A node
reaches the nodes that it imports, at the start or inside a function, or uses by name, and what its strings name:
modules ("tests.jobs.slow_job"; "lmms_stream" is the command), parts of a registry ("storage.s3:S3Store"), programs,
pages and data, by file, folder or pattern ("*.md"). Packages with lazy names lead to the file of a name. A test reaches
its fixtures, and of each conftest.py above the hooks and automatic fixtures. All tests run for a file that no test
reaches, a removed file, and the files in FOR_ALL.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from fnmatch import filter as filter_names
from fnmatch import fnmatch
from functools import cache
from pathlib import PurePosixPath

import lmms_stream  # noqa: F401
from lmms_stream.lazy import _Aliases

from .arrows import PACKAGE, ROOT, files

FOR_ALL = {"pyproject.toml", "constraints.txt", "Makefile", "conftest.py"}
# Resume, elasticity, exactly once, the demo and the public examples run after each change.
ALWAYS = (
    "tests/demo/test_demo.py", "tests/docs/test_pages.py", "tests/docs/test_readme.py", "tests/jobs/test_resume.py",
    "tests/loader/test_elastic.py", "tests/loader/test_loader.py", "tests/rl/test_example.py",
)  # fmt: skip
PRELOADED = "tests/preloaded.py"  # imports modules only to save time; tests name the modules that they need
CODE = (f"{PACKAGE}/", "converters/")
WHOLE, START, IMPORTS = "", "<start>", "<imports>"  # parts of a file without a name
KINDS = (ast.Import, ast.ImportFrom, ast.Constant, ast.arg, ast.Name, ast.Attribute)


def git(*words: str) -> list[str]:
    """Lines that git prints; exit with its message if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}; make test needs no history")
    return done.stdout.splitlines()


@cache
def paths() -> frozenset[str]:
    """Files of the checkout below its root, without ignored files and links."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard")
    return frozenset(path for path in listed if (ROOT / path).is_file() and not (ROOT / path).is_symlink())


@cache
def modules() -> dict[str, str]:
    """Dotted name -> path, of all files of Python."""
    ours = {name: str(path.relative_to(ROOT)) for name, path in files().items()}
    others = (path for path in paths() if path.endswith(".py") and not path.startswith(CODE))
    return ours | {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in others}


@cache
def former_names() -> dict[str, str]:
    """Former name of a module -> its name."""
    return {
        old: name for finder in sys.meta_path if isinstance(finder, _Aliases) for old, name in finder._names.items()
    }


@cache
def present_name(name: str) -> str:
    """Name of a module that has a former name, or is below a package with a former name."""
    head = name
    while head and head not in former_names():
        head = head.rpartition(".")[0]
    return former_names()[head] + name[len(head) :] if head else name


def absolute(path: str, name: str) -> str:
    """Absolute name of a module. "..plan" in lmms_stream/mds/core.py: "lmms_stream.plan"."""
    folder = PurePosixPath(f"{PACKAGE}/{path}" if path.startswith("converters/") else path).parent.parts
    below = name.lstrip(".")
    return ".".join([*folder[: len(folder) + 1 - (len(name) - len(below))], *filter(None, [below])])


def nodes_of(name: str, part: str = WHOLE) -> Iterator[str]:
    """Node of a part of a module, and the starts of the packages above, which Python imports first."""
    name = present_name(name)
    if name in modules():
        yield f"{modules()[name]}:{part}"
        while name := name.rpartition(".")[0]:
            yield f"{modules().get(name, '')}:{START}"


def inner(root: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of KINDS inside a node, without docstrings, types of arguments, and imports for type checkers."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, KINDS):
            yield node
        is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_doc or (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            continue
        for field in node._fields:
            if field not in ("ctx", "returns") and not (field == "annotation" and isinstance(node, ast.arg)):
                value = getattr(node, field, None)
                if isinstance(value, list):
                    waiting += [child for child in value if isinstance(child, ast.AST)]
                elif isinstance(value, ast.AST):
                    waiting.append(value)


@cache
def statements(path: str) -> list[ast.stmt]:
    return ast.parse((ROOT / path).read_text()).body


@cache
def parts(path: str) -> dict[str, list[ast.AST]]:
    """Name -> nodes of the lines that define it; START -> nodes of other lines; IMPORTS -> imports at the start."""
    nodes: dict[str, list[ast.AST]] = {START: [], IMPORTS: []}
    for line in statements(path):
        names = [START]
        if isinstance(line, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [line.name]
        elif isinstance(line, (ast.Import, ast.ImportFrom)):
            names = [IMPORTS, *(alias.asname or alias.name.split(".")[0] for alias in line.names)]
        elif isinstance(line, (ast.Assign, ast.AnnAssign)):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            targets = [target for group in targets for target in getattr(group, "elts", [group])]
            if all(isinstance(target, ast.Name) for target in targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            nodes.setdefault(name, []).extend(inner(line))
    return nodes


@cache
def lazy_homes(path: str) -> dict[str, str]:
    """Name -> module, of a file that imports names at their first use: the table in its call of lazy_names."""
    tables: dict[str, ast.expr] = {}
    for line in statements(path) if "lazy_names" in parts(path) else ():
        if isinstance(line, ast.Assign):
            tables |= {target.id: line.value for target in line.targets if isinstance(target, ast.Name)}
            if isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == "lazy_names":
                table = line.value.args[1]
                homes = ast.literal_eval(tables[table.id] if isinstance(table, ast.Name) else table)
                package = path if path.endswith("__init__.py") else path.replace(".py", "/__init__.py")
                return {name: absolute(package, f".{home}") for name, home in homes.items()}
    return {}


@cache
def by_ending() -> dict[str, set[str]]:
    """Ending of a path -> files that are, or are below, a path with the ending; folders of packages are left out."""
    endings: dict[str, set[str]] = defaultdict(set)
    packages = {PurePosixPath(path).parent for path in paths() if path.endswith("/__init__.py")}
    packages |= {folder for package in packages for folder in package.parents}
    for path in paths():
        for above in {PurePosixPath(path), *PurePosixPath(path).parents} - packages:
            for first in range(len(above.parts)):
                endings["/".join(above.parts[first:])].add(path)
    del endings["__init__.py"]
    return endings


def written(text: str) -> set[str]:
    """Nodes of the command, if it is in a text, and of the modules and lazy names in code inside the text."""
    nodes = {*nodes_of(f"{PACKAGE}.__main__")} if re.search(r"(^|-m |\n)lmms[-_]stream( |$)", text) else set()
    for name in {*re.findall(rf"{PACKAGE}(?:\.\w+)*", text)} if "import" in text else ():
        while present_name(name) not in modules():
            name = name.rpartition(".")[0]
        homes = lazy_homes(modules()[present_name(name)])
        nodes |= {*nodes_of(name, START if homes else WHOLE)}
        nodes |= {node for word in homes.keys() & {*re.findall(r"\w+", text)} for node in nodes_of(homes[word], word)}
    return nodes


@cache
def named(text: str, path: str) -> frozenset[str]:
    """Nodes that a string in a file names."""
    nodes: set[str] = set()
    is_test = not path.startswith(CODE)
    head, _, part = (absolute(path, text) if re.match(r"\.+\w", text) else text).partition(":")
    if is_test:
        nodes |= written(text)
    if re.fullmatch(r"\w+(\.\w+)*\.?", head):
        if is_test and "." in head[:-1] and head.endswith("."):  # the start of f"lmms_stream.rl.{name}"
            below = present_name(head[:-1]) + "."
            nodes |= {f"{modules()[name]}:" for name in modules() if name.startswith(below)}
        if part or ("." in head and "Registry" in parts(path)):
            nodes |= {*nodes_of(f"{PACKAGE}.{head}", part)}
        while "." in head and present_name(head) not in modules():  # an object in a module
            head = head.rpartition(".")[0]
        if "." in head:
            nodes |= {*nodes_of(head), *nodes_of(f"{head}.__main__")}
    if is_test and "*" in text and text.strip("*./"):
        nodes |= {f"{other}:" for other in filter_names(paths(), f"*/{text.rpartition('/')[2]}")}
    nodes |= {
        f"{other}:"
        for other in by_ending().get(text.strip("/"), ())
        if is_test or (other.startswith(CODE) and not other.endswith(".py"))
    }
    beside = path.removesuffix(".py") + text
    return frozenset(nodes | ({f"{beside}:"} if text.startswith(".") and beside in paths() else set()))


def imported(node: ast.Import | ast.ImportFrom, path: str, *, part: str = WHOLE, only: str = "") -> Iterator[str]:
    """Nodes of an import in a file. part: START if its names are not used. only: the name that is used."""
    for alias in node.names:
        if only and only != (alias.asname or alias.name.split(".")[0]):
            continue
        base, name = (node.module or "", alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, "")
        if isinstance(node, ast.ImportFrom) and node.level:
            base = absolute(path, "." * node.level + base)
        base = present_name(base)
        beside = f"{PurePosixPath(path).parent}/{base.split('.')[0]}.py"  # a neighbour of a program
        if base in modules() and present_name(f"{base}.{name}") not in modules():
            if name in lazy_homes(modules()[base]):
                yield from nodes_of(lazy_homes(modules()[base])[name], part or name)
                name = "__getattr__"
            yield from nodes_of(base, part or name.replace("*", WHOLE))
        elif base.startswith(PACKAGE) or base in modules():
            yield from nodes_of(f"{base}.{name}".rstrip("."), part)
        elif beside in paths() and not path.startswith(CODE):
            yield f"{beside}:{part}"


@cache
def lazy_attributes(path: str) -> dict[str, str]:
    """Name -> module, of the packages with lazy names that a file imports as a whole."""
    homes: dict[str, str] = {}
    for node in {node for nodes in parts(path).values() for node in nodes}:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for other in imported(node, path):
                if other.endswith(".py:"):
                    homes |= lazy_homes(other[:-1])
    return homes


@cache
def conftests(path: str) -> list[str]:
    above = (f"{folder}/conftest.py" for folder in PurePosixPath(path).parents)
    return [name for name in above if name in paths()]


def fixtures(name: str, path: str) -> set[str]:
    """Nodes of the fixtures with a name."""
    return {f"{conftest}:{name}" for conftest in conftests(path) if name in parts(conftest)}


def automatic(path: str) -> set[str]:
    """Nodes of hooks and automatic fixtures above a file."""
    return {
        f"{conftest}:{line.name}"
        for conftest in conftests(path)
        for line in statements(conftest)
        if isinstance(line, ast.FunctionDef)
        and (line.name.startswith("pytest_") or "autouse" in ast.unparse(line.decorator_list))  # type: ignore[arg-type]
    }


@cache
def reads(node: str) -> frozenset[str]:
    """Nodes that a node reaches directly."""
    path, _, part = node.rpartition(":")
    if path.endswith((".md", ".ipynb", ".sh")):
        return frozenset(written((ROOT / path).read_text()))
    if not path.endswith(".py") or path == PRELOADED:
        return frozenset()
    own = parts(path)
    is_conftest = path.endswith("/conftest.py")
    if part not in own:  # the whole file, or a name defined inside another statement
        names = () if is_conftest else own.keys() - {IMPORTS}
        return frozenset({f"{path}:{name}" for name in names} | (automatic(path) if is_test_file(path) else set()))
    nodes = set() if is_conftest else {f"{path}:{START}"}  # imports of a conftest.py count with the names' use
    if part == START and not is_conftest:
        nodes |= {other for line in own[IMPORTS] for other in imported(line, path, part=START)}  # type: ignore[arg-type]
    for inside in own[part]:
        if isinstance(inside, (ast.Import, ast.ImportFrom)):
            nodes |= {*imported(inside, path, only=part if inside in own[IMPORTS] else "")}
        elif isinstance(inside, ast.Constant) and isinstance(inside.value, str):
            nodes |= named(inside.value, path) | fixtures(inside.value, path)
        elif isinstance(inside, ast.arg):
            nodes |= fixtures(inside.arg, path)
        elif isinstance(inside, ast.Name) and inside.id in own and inside.id != part:
            nodes.add(f"{path}:{inside.id}")
        elif isinstance(inside, ast.Attribute) and inside.attr in lazy_attributes(path):
            nodes |= {*nodes_of(lazy_attributes(path)[inside.attr], inside.attr)}
    return frozenset(nodes)


def is_test_file(path: str) -> bool:
    return path.startswith("tests/") and fnmatch(path, "*/test_*.py")


@cache
def reaching_tests() -> dict[str, set[str]]:
    """File -> files of tests that reach the file; a test reaches itself."""
    tests = sorted(filter(is_test_file, paths()))
    bits = {f"{test}:": 1 << number for number, test in enumerate(tests)}  # node -> a bit for each test that reaches it
    waiting = OrderedDict.fromkeys(bits)
    gc.disable()  # all trees are kept: collections would free nothing
    while waiting:
        node, _ = waiting.popitem(last=False)
        for other in reads(node):
            before = bits.get(other, 0)
            if bits[node] & ~before:
                bits[other] = before | bits[node]
                waiting[other] = None
    gc.enable()
    of_files: dict[str, int] = defaultdict(int)
    for node, reaching in bits.items():
        of_files[node.rpartition(":")[0]] |= reaching
    numbered = [*enumerate(tests)]
    return {path: {test for number, test in numbered if reaching >> number & 1} for path, reaching in of_files.items()}


def chosen(changed: Iterable[str]) -> tuple[Collection[str], str]:
    """Return files of tests for changed files, and the file for which all tests run."""
    tests = {*ALWAYS}
    for path in sorted(changed):
        is_removed_test = is_test_file(path) and path not in paths()
        if PurePosixPath(path).name in FOR_ALL or not (reaching_tests().get(path) or is_removed_test):
            return [*filter(is_test_file, paths())], path
        tests |= reaching_tests().get(path, set())
    return tests, ""


def main(base: str, *command: str) -> int:
    """Run a command of pytest with the tests for the changes since a commit."""
    changed = {*git("diff", "--name-only", "--no-renames", base), *git("ls-files", "--others", "--exclude-standard")}
    tests, cause = chosen(changed)
    number = f"all {len(tests)}" if cause else f"{len(tests)} of {sum(map(is_test_file, paths()))}"
    note = f"make test-changed: {number} files of tests, for {len(changed)} files changed since {base}"
    note = f"{note}{f', because of {cause}' if cause else ''}; make test runs all\n"
    sys.stdout.write(note)
    sys.stdout.flush()
    status = subprocess.run([*command, *sorted(tests)], cwd=ROOT, check=False).returncode
    sys.stdout.write(note)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
