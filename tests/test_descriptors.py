"""benchdnn's descriptors: what they mean, how they print, and that real ones bind to the sizes they state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from convgrad import SpecError
from convgrad.spec import bind
from convgrad.spec.descriptors import DIRECTIONS, Descriptor, read, scan

CORPUS = Path(__file__).parents[2] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*conv/shapes_*"))

EXAMPLES = [
    # text, transposed, what it means
    (
        "ic16oc16_ih7kh3ph1",
        False,
        dict(mb=2, g=None, ic=16, oc=16, i=(7, 7), o=(7, 7), k=(3, 3), s=(1, 1), p=(1, 1), d=(0, 0), end=(1, 1)),
    ),
    (
        'g2mb256oc96oh27ic256ih27kh5ph2n"x"',
        True,
        dict(mb=256, g=2, ic=256, oc=96, i=(27, 27), o=(27, 27), k=(5, 5), p=(2, 2), end=(2, 2), name='"x"'),
    ),
    ("ic3oc17_iw8ow4kw3pw1sw2", False, dict(ndims=3, i=(8,), o=(4,), k=(3,), s=(2,), p=(1,), end=(0,))),
    ("ic16oc16_iw1kw3ow100pw100", False, dict(ndims=3, i=(1,), o=(100,), k=(3,), p=(100,), end=(1,))),
    (
        "mb1ic512ih7iw7id6oc256oh11ow11od10kh3kw3kd3ph0pw0dh1dw1dd1",
        True,
        dict(ndims=5, i=(6, 7, 7), o=(10, 11, 11), p=(0, 0, 0), dilations=(2, 2, 2), end=(0, 0, 0)),
    ),
    # The end pad is negative where the last window leaves a rest of the input.
    ("ic2oc2iw8ow3kw2sw3pw0", False, dict(o=(3,), end=(0,))),
    ("ic2oc2iw9ow3kw2sw3pw0", False, dict(o=(3,), end=(-1,))),
    ("ic2oc2iw3ow9kw2sw3pw0", True, dict(o=(9,), end=(-1,))),
    # The padding deduced from the output is half of the total, rounded towards zero.
    ("ic2oc2iw5ow5kw4", False, dict(p=(1,), end=(2,))),
    ("ic2oc2iw5ow10kw4sw2", True, dict(p=(1,), end=(1,))),
    ("ic2oc2iw9ow3kw2sw3", False, dict(p=(0,), end=(-1,))),
    # A later key goes before an earlier one; a cube from one axis; nothing but a name after n.
    ("ic9ic2oc2_id5kd3n_mb7", False, dict(ic=2, mb=2, ndims=5, o=(3, 3, 3), name="_mb7")),
    ("g1ic2oc2ih5kh3iw9kw1", False, dict(g=1, i=(5, 9), o=(3, 9), k=(3, 1))),
]


@pytest.mark.parametrize(("text", "transposed", "meaning"), EXAMPLES, ids=lambda v: v if isinstance(v, str) else "")
def test_examples(text, transposed, meaning):
    descriptor = Descriptor.parse(text, transposed=transposed)
    assert {key: getattr(descriptor, key) for key in meaning} == meaning
    _agree(descriptor)


def test_weights_of_a_grouped_deconvolution():
    operation = Descriptor.parse("g2mb1oc96oh27ic256ih27kh5ph2", transposed=True).operation("BWD_W")
    assert operation.op.kind == "ConvTransposeBackwardWeights"
    assert operation.shape == (256, 48, 5, 5)
    assert operation.attributes["weights_shape"] == (256, 48, 5, 5)
    last = Descriptor.parse("g2mb1oc96oh27ic256ih27kh5ph2", transposed=True).operation("BWD_W", data_format="NXC")
    assert (last.attributes["weights_format"], last.shape) == ("XOI", (5, 5, 48, 256))
    assert [d.shape for d in last.inputs] == [(1, 27, 27, 256), (1, 27, 27, 96)]


def test_output_padding_of_a_deconvolution():
    operation = Descriptor.parse("ic2oc2iw3ow9kw2sw3pw0", transposed=True).operation("FWD_B", dtype="bf16")
    assert operation.attributes["pads_end"] == (0,)
    assert operation.attributes["output_padding"] == (1,)
    assert [(d.dtype, d.shape) for d in operation.inputs] == [
        ("bf16", (2, 2, 3)),
        ("bf16", (2, 2, 2)),
        ("bf16", (2,)),
    ]


@pytest.mark.parametrize(
    ("text", "short", "canonical"),
    [
        (
            "ic16oc16_ih7kh3ph1",
            "ic16ih7oc16oh7kh3ph1",
            "g1mb2ic16ih7iw7oc16oh7ow7kh3kw3sh1sw1ph1pw1dh0dw0",
        ),
        (
            'g1mb5_ic4oc6iw9kw3sw2dw1n"a"',
            'g1mb5ic4iw9oc6ow3kw3sw2pw0dw1n"a"',
            'g1mb5ic4iw9oc6ow3kw3sw2pw0dw1n"a"',
        ),
        (
            "ic1oc1id4kd2sd2",
            "ic1id4oc1od2kd2sd2pd0",
            "g1mb2ic1id4ih4iw4oc1od2oh2ow2kd2kh2kw2sd2sh2sw2pd0ph0pw0dd0dh0dw0",
        ),
        ("ic1oc1ih4kh2iw4kw1", "ic1ih4iw4oc1oh3ow4kh2kw1ph0pw0", "g1mb2ic1ih4iw4oc1oh3ow4kh2kw1sh1sw1ph0pw0dh0dw0"),
    ],
)
def test_printing(text, short, canonical):
    descriptor = Descriptor.parse(text)
    assert str(descriptor) == short
    assert descriptor.canonical() == canonical


def test_batch_size_override():
    descriptor = Descriptor.parse("mb8ic1oc1iw3kw3")
    assert str(descriptor.with_mb(3)) == "mb3ic1iw3oc1ow1kw3pw0"
    assert descriptor.with_mb(0) is descriptor


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "ic must be given"),
        ("oc4ih5kh3", "ic must be given"),
        ("ic4oc0ih5kh3", "oc must be given"),
        ("_ic3oc4ih5kh3", "character 1"),
        ("ic3__oc4ih5kh3", "character 5"),
        ("ic3oc4ih5kx3", "character 10, 'kx3'"),
        ("ic3oc4ih kh3", "ih at character 7"),
        ("ic3oc4ih5kh3ph-1", "ph at character 13"),
        ("ic3oc4ih5kh3 ", "character 13"),
        ("ic3oc4ih5", "kh must be given"),
        ("ic3oc4kh5", "ih must be given"),
        ("ic3oc4oh5kh3", "ih must be given"),
        ("ic3oc4", "no spatial sizes"),
        ("ic3oc4sh2", "ih must be given"),
        ("ic3oc4ih5kh3sh0", "sh must be at least 1"),
        ("g0ic3oc4ih5kh3", "g must be at least 1"),
        ("g2ic3oc4ih5kh3", "g must divide"),
        ("ic3oc4ih5kh7", "the kernel (7) is larger than the input with its padding (5)"),
        ("ic3oc4ih5kh3dh2", "a kernel of 3 that covers 7 is larger than the input with its padding (5)"),
        ("IC3oc4ih5kh7", "keys are lower-case letters, got 'IC3"),
        ("ic3oc4ih5kh3id5kd3", "d and h"),
        ("ic4oc4ih10kh1oh8", "oh does not belong"),
        ("ic4oc4ih10kh1oh5ph0sh1", "oh does not belong"),
        ("ic9999999999999999999oc1iw1kw1", "ic at character 1 is 2**63 or more"),
        ("ic" + "9" * 5000, "ic at character 1 is 2**63 or more"),
        ("ic٣oc1iw1kw1", "ic at character 1"),
    ],
)
def test_refusals_name_the_place(text, place):
    with pytest.raises(SpecError) as caught:
        Descriptor.parse(text)
    assert place in str(caught.value)
    assert repr(text) in str(caught.value)


def test_refused_directions_and_formats():
    descriptor = Descriptor.parse("ic1oc1iw3kw3")
    with pytest.raises(SpecError, match="did you mean 'BWD_D'"):
        descriptor.operation("BWDD")
    with pytest.raises(SpecError, match="NCX or NXC, got 'NHWC'"):
        descriptor.operation("FWD_D", data_format="NHWC")


def test_file(tmp_path):
    path = tmp_path / "shapes_mine"
    path.write_text('# a comment\n\n--batch=shapes_other\nic1oc1iw3kw3n"a#b" # more\n  --mb=4 ic2oc2iw3kw3\n')
    batch = read(path)
    assert [d.ic for d in batch.descriptors] == [1, 2]
    assert batch.descriptors[0].name == '"a#b"'
    assert batch.options == ("--batch=shapes_other", "--mb=4")
    with pytest.raises(SpecError, match="shapes:2: descriptor 'ic1': oc must be given"):
        scan(["# fine", "ic1"], where="shapes")


@pytest.mark.slow
@pytest.mark.skipif(not FILES, reason="the corpus is not here")
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_corpus(path):
    batch = read(path, transposed=path.parent.name == "deconv")
    assert batch.descriptors
    for descriptor in batch.descriptors:
        _agree(descriptor)


def _agree(descriptor: Descriptor) -> None:
    """A descriptor reads back what it prints, and every direction binds to the sizes that it states."""
    again = Descriptor.parse(str(descriptor), transposed=descriptor.transposed)
    assert again == descriptor
    again = Descriptor.parse(descriptor.canonical(), transposed=descriptor.transposed)
    assert again == replace(descriptor, g=descriptor.groups)
    for direction in DIRECTIONS:
        for data_format in ("NCX", "NXC"):
            operation = descriptor.operation(direction, data_format=data_format)
            binding = bind(operation.op, operation.inputs, operation.attributes)
            assert binding.shape == operation.shape, (str(descriptor), direction, data_format)
            p = binding.problem
            x, y = (descriptor.o, descriptor.i) if descriptor.transposed else (descriptor.i, descriptor.o)
            cx, cy = (descriptor.oc, descriptor.ic) if descriptor.transposed else (descriptor.ic, descriptor.oc)
            assert (p.n, p.g, p.g * p.cx, p.g * p.cy) == (descriptor.mb, descriptor.groups, cx, cy)
            assert (p.x, p.w, p.y) == (x, descriptor.k, y)
            assert (p.stride, p.dilation, p.pad) == (descriptor.s, descriptor.dilations, descriptor.p)
