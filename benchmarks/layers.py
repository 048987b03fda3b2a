"""Real layers, as benchdnn's descriptors, in batches that take some milliseconds on two cores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from convgrad.spec.descriptors import Descriptor


@dataclass(frozen=True)
class Layer:
    """One layer: what kind it is for the means, its sizes, and which network it is from."""

    name: str
    group: str
    text: str
    source: str

    @property
    def transposed(self) -> bool:
        """Whether the layer is a transposed convolution."""
        return self.name.startswith("t-")

    @cached_property
    def descriptor(self) -> Descriptor:
        """The sizes."""
        return Descriptor.parse(self.text, transposed=self.transposed)

    def with_batch(self, images: int) -> Layer:
        """The same layer with so many images."""
        return replace(self, text=re.sub(r"mb\d+", f"mb{images}", self.text, count=1))


GROUPS = {
    "dense": "stride 1, kernels above 1x1",
    "strided": "stride 2 and 4, 1x1 included",
    "pointwise": "1x1, stride 1",
    "dilated": "dilation above 1, 2D",
    "1D": "1D, stride, dilation or neither",
    "3D": "3D",
    "transposed": "transposed, any rank",
    "uneven": "more dense ones, with channels that are no multiple of 16",
    "depthwise": "one channel per group",
    "grouped": "several groups of several channels",
    "stem": "few channels on one side",
}
DENSE = ("dense", "strided", "pointwise", "dilated", "1D", "3D", "transposed")
"""The groups in which many channels all meet each other: "all dense" is the mean over these."""

_RESNET = "ResNet-50 (He et al. 2015, torchvision resnet50)"
_VGG = "VGG-16 (Simonyan, Zisserman 2014)"
_INCEPTION = "Inception-v3 (Szegedy et al. 2015, torchvision inception_v3)"
_DENSENET = "DenseNet-121 (Huang et al. 2016)"
_MOBILENET = "MobileNetV2 (Sandler et al. 2018)"
_EFFICIENT = "EfficientNet-B0 (Tan, Le 2019)"
_CONVNEXT = "ConvNeXt-T (Liu et al. 2022)"
_RESNEXT = "ResNeXt-50 32x4d (Xie et al. 2016)"
_DCGAN = "DCGAN generator (Radford et al. 2015)"
_HIFIGAN = "HiFi-GAN V1 generator, segments of 8192 samples (Kong et al. 2020)"
_HRNET = "HRNet-W18 (Wang et al. 2019), 224 input"
_UNET3D = "3D U-Net (Çiçek et al. 2016)"

LAYERS = (
    Layer("resnet-3x3-64", "dense", "mb8ic64oc64ih56kh3ph1", f"{_RESNET}, layer1 conv2"),
    Layer("resnet-3x3-128", "dense", "mb8ic128oc128ih28kh3ph1", f"{_RESNET}, layer2 conv2"),
    Layer("resnet-3x3-256", "dense", "mb8ic256oc256ih14kh3ph1", f"{_RESNET}, layer3 conv2"),
    Layer("resnet-3x3-512", "dense", "mb8ic512oc512ih7kh3ph1", f"{_RESNET}, layer4 conv2"),
    Layer("vgg-conv1_2", "dense", "mb1ic64oc64ih224kh3ph1", f"{_VGG}, conv1_2"),
    Layer("vgg-conv3_1", "dense", "mb1ic128oc256ih56kh3ph1", f"{_VGG}, conv3_1"),
    Layer("vgg-conv4_2", "dense", "mb1ic512oc512ih28kh3ph1", f"{_VGG}, conv4_2"),
    Layer("inception-5x5", "dense", "mb8ic48oc64ih35kh5ph2", f"{_INCEPTION}, Mixed_5b branch5x5_2"),
    Layer("inception-1x7", "dense", "mb16ic128oc128ih17kh1kw7ph0pw3iw17", f"{_INCEPTION}, Mixed_6b branch7x7_2"),
    Layer("densenet-3x3-32", "dense", "mb16ic128oc32ih28kh3ph1", f"{_DENSENET}, dense block 2"),
    Layer("efficientnet2-fused", "dense", "mb4ic48oc192ih56kh3ph1", "EfficientNetV2-S (Tan, Le 2021), Fused-MBConv4"),
    Layer("unet-decoder", "dense", "mb1ic128oc64ih128kh3ph1", "U-Net (Ronneberger et al. 2015), last decoder stage"),
    Layer("resnet-3x3s2-128", "strided", "mb8ic128oc128ih56oh28kh3sh2ph1", f"{_RESNET}, layer2.0 conv2"),
    Layer("resnet-3x3s2-512", "strided", "mb8ic512oc512ih14oh7kh3sh2ph1", f"{_RESNET}, layer4.0 conv2"),
    Layer("resnet-1x1s2-512", "strided", "mb8ic256oc512ih56oh28kh1sh2ph0", f"{_RESNET}, layer2.0 downsample"),
    Layer(
        "darknet-3x3s2", "strided", "mb1ic64oc128ih208oh104kh3sh2ph1", "Darknet-53 (Redmon, Farhadi 2018), 416 input"
    ),
    Layer("convnext-2x2s2", "strided", "mb16ic96oc192ih56oh28kh2sh2ph0", f"{_CONVNEXT}, first downsampling"),
    Layer("inception-3x3s2", "strided", "mb4ic288oc384ih35oh17kh3sh2ph0", f"{_INCEPTION}, Mixed_6a branch3x3"),
    Layer("resnet-1x1-256-64", "pointwise", "mb16ic256oc64ih56kh1ph0", f"{_RESNET}, layer1 conv1"),
    Layer("resnet-1x1-64-256", "pointwise", "mb16ic64oc256ih56kh1ph0", f"{_RESNET}, layer1 conv3"),
    Layer("resnet-1x1-512-2048", "pointwise", "mb16ic512oc2048ih7kh1ph0", f"{_RESNET}, layer4 conv3"),
    Layer("convnext-1x1-96-384", "pointwise", "mb8ic96oc384ih56kh1ph0", f"{_CONVNEXT}, stage 1 pwconv1"),
    Layer("densenet-1x1-256", "pointwise", "mb16ic256oc128ih28kh1ph0", f"{_DENSENET}, dense block 2, fifth conv1"),
    Layer("mobilenet-1x1-96-576", "pointwise", "mb32ic96oc576ih14kh1ph0", f"{_MOBILENET}, expansion at 14x14"),
    Layer("efficientnet-1x1-240-40", "pointwise", "mb32ic240oc40ih28kh1ph0", f"{_EFFICIENT}, projection at 28x28"),
    Layer("deeplab-aspp-d12", "dilated", "mb1ic320oc256ih33kh3ph12dh11", "DeepLabv3 (Chen et al. 2017) on MobileNetV2"),
    Layer("deeplab-layer4-d2", "dilated", "mb1ic512oc512ih33kh3ph2dh1", "DeepLabv3, ResNet layer4 at output stride 16"),
    Layer(
        "drn-3x3-d2", "dilated", "mb2ic256oc256ih28kh3ph2dh1", "Dilated residual network (Yu et al. 2017), 224 input"
    ),
    Layer("wavenet-k2-d128", "1D", "mb4ic64oc128iw16128ow16000kw2pw0dw127", "WaveNet (van den Oord et al. 2016)"),
    Layer("hifigan-k11-d5", "1D", "mb4ic256oc256iw256kw11pw25dw4", f"{_HIFIGAN}, first residual stage"),
    Layer("hifigan-k7", "1D", "mb4ic128oc128iw2048kw7pw3", f"{_HIFIGAN}, second residual stage"),
    Layer(
        "wav2vec-k3-s2",
        "1D",
        "mb1ic512oc512iw3199ow1599kw3sw2pw0",
        "wav2vec 2.0 (Baevski et al. 2020), encoder layer 1",
    ),
    Layer("unet3d-3x3x3-128", "3D", "mb1ic128oc128id16kd3pd1", f"{_UNET3D}, third stage"),
    Layer("unet3d-3x3x3s2", "3D", "mb1ic64oc128id32od16kd3sd2pd1", "nnU-Net 3D (Isensee et al. 2021), downsampling"),
    Layer(
        "i3d-3x3x3",
        "3D",
        "mb1ic96oc128id8ih28iw28kd3kh3kw3pd1ph1pw1",
        "I3D (Carreira, Zisserman 2017), Mixed_3b, 16 frames",
    ),
    Layer(
        "r2plus1d-1x3x3", "3D", "mb1ic64oc144id8ih56iw56kd1kh3kw3pd0ph1pw1", "R(2+1)D (Tran et al. 2018), conv2 spatial"
    ),
    Layer("t-dcgan-512", "transposed", "mb8ic512oc256ih8oh16kh4sh2ph1", f"{_DCGAN}, third layer"),
    Layer("t-dcgan-256", "transposed", "mb8ic256oc128ih16oh32kh4sh2ph1", f"{_DCGAN}, fourth layer"),
    Layer("t-unet-2x2", "transposed", "mb4ic128oc64ih64oh128kh2sh2ph0", "U-Net, last up-convolution, 128x128 patches"),
    Layer("t-hifigan-k16-s8", "transposed", "mb16ic512oc256iw32ow256kw16sw8pw4", f"{_HIFIGAN}, first upsampling"),
    Layer("t-unet3d-2x2x2", "transposed", "mb4ic128oc128id8od16kd2sd2pd0", f"{_UNET3D}, up-convolution"),
    Layer("hrnet-3x3-18", "uneven", "mb8ic18oc18ih56kh3ph1", f"{_HRNET}, first branch"),
    Layer("hrnet-3x3-36", "uneven", "mb16ic36oc36ih28kh3ph1", f"{_HRNET}, second branch"),
    Layer("efficientnet2-3x3-24", "uneven", "mb4ic24oc24ih112kh3ph1", "EfficientNetV2-S, Fused-MBConv1"),
    Layer("mobilenet-1x1-24-144", "uneven", "mb16ic24oc144ih56kh1ph0", f"{_MOBILENET}, expansion at 56x56"),
    Layer("efficientnet-1x1-40-240", "uneven", "mb16ic40oc240ih28kh1ph0", f"{_EFFICIENT}, expansion at 28x28"),
    Layer("mobilenet-dw3x3", "depthwise", "g144mb8ic144oc144ih56kh3ph1", f"{_MOBILENET}, depthwise at 56x56"),
    Layer("mobilenet-dw3x3s2", "depthwise", "g144mb16ic144oc144ih56oh28kh3sh2ph1", f"{_MOBILENET}, depthwise to 28x28"),
    Layer("efficientnet-dw5x5", "depthwise", "g672mb16ic672oc672ih14kh5ph2", f"{_EFFICIENT}, stage 5"),
    Layer("convnext-dw7x7", "depthwise", "g96mb8ic96oc96ih56kh7ph3", f"{_CONVNEXT}, stage 1"),
    Layer("resnext-g32-128", "grouped", "g32mb8ic128oc128ih56kh3ph1", f"{_RESNEXT}, layer1 conv2"),
    Layer("resnext-g32-512", "grouped", "g32mb16ic512oc512ih14kh3ph1", f"{_RESNEXT}, layer3 conv2"),
    Layer("resnext101-g32-256", "grouped", "g32mb4ic256oc256ih56kh3ph1", "ResNeXt-101 32x8d (2016), layer1 conv2"),
    Layer("regnet-g4-192", "grouped", "g4mb8ic192oc192ih28kh3ph1", "RegNetX-3.2GF (Radosavovic et al. 2020), stage 2"),
    Layer("resnet-stem", "stem", "mb4ic3oc64ih224oh112kh7sh2ph3", f"{_RESNET}, conv1"),
    Layer("vgg-stem", "stem", "mb4ic3oc64ih224kh3ph1", f"{_VGG}, conv1_1"),
    Layer("mobilenet-stem", "stem", "mb8ic3oc32ih224oh112kh3sh2ph1", f"{_MOBILENET}, conv1"),
    Layer("convnext-stem", "stem", "mb8ic3oc96ih224oh56kh4sh4ph0", f"{_CONVNEXT}, stem"),
    Layer(
        "i3d-stem",
        "stem",
        "mb1ic3oc64id16ih112iw112od8oh56ow56kd7kh7kw7sd2sh2sw2pd3ph3pw3",
        "I3D, conv1, 112x112 crops",
    ),
    Layer("t-dcgan-image", "stem", "mb32ic128oc3ih32oh64kh4sh2ph1", f"{_DCGAN}, last layer"),
)
