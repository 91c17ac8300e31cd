mod documents;
mod formulas;

use ddp_kernels::ops::Attention;
use ddp_kernels::{DType, Device, Tensor};

use super::*;
use crate::CrossEntropy;
use crate::check::{DerivativeCheck, Objective};
use crate::models::{Model, ModelSpec};
use crate::pass::tests::in_pass;
use crate::{Module, Scope, Var};

fn tiny() -> GptSpec {
    GptSpec {
        layers: 1,
        heads: 4,
        kv_heads: 2,
        width: 8,
        mlp_width: 6,
        context: 5,
        ..GptSpec::default()
    }
}

fn shape(context: &[usize]) -> DataShape<'_> {
    DataShape {
        row_shape: context,
        image: &[],
        dtype: DType::I64,
        outputs: 7,
        documents: false,
    }
}

fn worst(spec: &GptSpec, frozen: &dyn Fn(&str) -> bool) -> f64 {
    let layers = spec.layers(&shape(&[spec.context])).unwrap();
    let targets: Vec<i64> = (0..10).map(|index| index * 3 % 7).collect();
    let targets = Tensor::from_slice(&targets, &[2, 5], Device::Cpu).unwrap();
    let loss = CrossEntropy::default();
    let check = DerivativeCheck {
        rows: 2,
        seed: 3,
        objective: Objective::Loss(&loss, &targets),
        frozen,
        ..DerivativeCheck::new(&[5])
    };
    let worst = check.worst(layers).unwrap();
    println!("{worst:?}");
    worst.error()
}

#[test]
fn matrices_for_muon_are_those_of_blocks_and_whole_for_each_use() {
    let spec = GptSpec {
        mlp: MlpKind::Swiglu,
        tied: false,
        ..tiny()
    };
    let layers = Box::new(spec.layers(&shape(&[5])).unwrap());
    let model = Model::new(layers, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let in_order = model.params.in_order().into_iter();
    let hidden = in_order.filter(|parameter| !parameter.matrices.is_empty());
    let hidden: Vec<_> = hidden.map(|p| (p.name.as_str(), &p.matrices[..])).collect();
    let expected: [(&str, &[usize]); 4] = [
        ("blocks.0.attention.mix.qkv.weight", &[8, 4, 4]),
        ("blocks.0.attention.mix.out.weight", &[8]),
        ("blocks.0.mlp.up.weight", &[6, 6]),
        ("blocks.0.mlp.down.weight", &[8]),
    ];
    assert_eq!(hidden, expected);
}

#[test]
fn derivatives_are_those_of_the_loss_in_every_variant() {
    let all = |_: &str| false;
    assert!(worst(&tiny(), &all) < 1e-7);
    let llama = GptSpec {
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        tied: false,
        ..tiny()
    };
    assert!(worst(&llama, &all) < 1e-7);
    let mlp = MlpKind::Relu2;
    assert!(worst(&GptSpec { mlp, ..tiny() }, &all) < 1e-6);
    let plain = GptSpec {
        norm: NormKind::Rms,
        mlp: MlpKind::Gelu,
        bias: false,
        tied: false,
        kv_heads: 0,
        dropout: 0.2,
        ..tiny()
    };
    assert!(worst(&plain, &all) < 1e-7);
    assert!(worst(&tiny(), &|name| !name.contains("norm")) < 1e-7);
    let padded = GptSpec { vocab: 9, ..tiny() };
    assert!(worst(&padded, &all) < 1e-7);
    for spec in families(&tiny()) {
        // A norm of few columns bends the loss more within a step of the differences.
        let error = worst(&spec, &all);
        assert!(error < 1e-6, "{spec:?}: {error}");
        // Keys are normalized below what is trained, and above it.
        assert!(worst(&spec, &|name| !name.contains("q_norm")) < 1e-6);
    }
}

/// What families of downloaded models do beyond a plain Llama, each with the sizes of `size`.
fn families(size: &GptSpec) -> [GptSpec; 6] {
    let llama = GptSpec {
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        rope_base: 100.0,
        ..size.clone()
    };
    [
        GptSpec {
            qkv_bias: true,
            rope_scaling: "llama3:8:1:4:16".into(),
            ..llama.clone()
        },
        GptSpec {
            head_size: 6,
            qk_norm: QkNorm::Head,
            rope_scaling: "yarn:4:16:32:1:1.1:1".into(),
            ..llama.clone()
        },
        GptSpec {
            norm_place: NormPlace::After,
            qk_norm: QkNorm::Heads,
            rope_scaling: "linear:2".into(),
            rope_skip: 2,
            ..llama.clone()
        },
        GptSpec {
            norm_place: NormPlace::Both,
            // Norms of small values after a part bend the loss more.
            norm_epsilon: 0.1,
            qk_norm: QkNorm::Head,
            mlp: MlpKind::Geglu,
            window: 3,
            window_skip: 2,
            window_rope_base: 10.0,
            attention_scalar: 5,
            scale_embedding: true,
            layers: 2,
            ..llama.clone()
        },
        GptSpec {
            mlp: MlpKind::Geglu,
            window: 3,
            attention_cap: 0.01,
            logit_cap: 0.02,
            vocab: 9,
            ..llama.clone()
        },
        GptSpec {
            head_size: 7,
            rope_share: 0.6,
            window: 4,
            rope_scaling: "longrope:64:1.2:1:2:3:4".into(),
            tied: false,
            ..llama
        },
    ]
}

#[test]
fn untrained_tokens_get_gradients_from_the_head_alone() {
    let gradients = |spec: GptSpec| {
        let layers = Box::new(spec.layers(&shape(&[5])).unwrap());
        let model = Model::new(layers, &[5], DType::F64, Device::Cpu, 1, &|_| false).unwrap();
        let params = &model.params;
        let tokens = Tensor::from_slice(&[2i64, 3, 2, 1, 0], &[1, 5], Device::Cpu).unwrap();
        in_pass(&model, true, |mut pass| {
            let y = model.forward(&mut pass, &tokens).unwrap();
            model.backward(&mut pass, &y).unwrap();
        });
        let mut all = model.params.gradients().to_vec::<f64>().unwrap();
        let table = params.find("embedding.tokens.weight").unwrap();
        let rows: Vec<f64> = all.drain(table.range.clone()).collect();
        let rows: Vec<_> = rows.chunks(8).map(<[f64]>::to_vec).collect();
        (rows, all)
    };
    for tied in [false, true] {
        let spec = GptSpec {
            vocab: 7,
            tied,
            ..tiny()
        };
        let (trained, rest) = gradients(spec.clone());
        let untrained_tokens = vec![2, 4];
        let (untrained, other_rest) = gradients(GptSpec {
            untrained_tokens,
            ..spec.clone()
        });
        assert!(rest == other_rest);
        for (token, (with, without)) in trained.iter().zip(&untrained).enumerate() {
            assert_eq!(with == without, token != 2, "{token}, tied: {tied}");
        }
        assert_eq!(untrained[2].iter().all(|it| *it == 0.0), !tied);
    }
}

#[test]
fn parameters_have_plain_names_and_the_tied_head_is_counted_once() {
    let spec = ModelSpec::from(tiny());
    let count = spec.parameter_count(&shape(&[5])).unwrap();
    let block = 2 * 16 + (8 * 16 + 16) + (8 * 8 + 8) + (8 * 6 + 6) + (6 * 8 + 8);
    assert_eq!(count, 7 * 8 + 5 * 8 + block + 16);
    let layers = Box::new(tiny().layers(&shape(&[5])).unwrap());
    let model = Model::new(layers, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let in_order = model.params.in_order();
    let names: Vec<_> = in_order.iter().map(|one| &one.name[..]).collect();
    assert_eq!(
        names[..10],
        [
            "embedding.tokens.weight",
            "embedding.positions.weight",
            "blocks.0.attention.norm.weight",
            "blocks.0.attention.norm.bias",
            "blocks.0.attention.mix.qkv.weight",
            "blocks.0.attention.mix.qkv.bias",
            "blocks.0.attention.mix.out.weight",
            "blocks.0.attention.mix.out.bias",
            "blocks.0.mlp.norm.weight",
            "blocks.0.mlp.norm.bias",
        ]
    );
    assert_eq!(names.last(), Some(&"norm.bias"));
    assert_eq!(model.output_shape, [5, 7]);
}

#[test]
fn settings_that_do_not_fit_are_refused_by_name() {
    let refused = |change: fn(&mut GptSpec), setting: &str| {
        let mut spec = tiny();
        change(&mut spec);
        let error = spec.check().unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{setting}`")), "{error}");
    };
    refused(|spec| spec.heads = 3, "heads");
    refused(|spec| spec.kv_heads = 3, "kv-heads");
    refused(|spec| spec.layers = 0, "layers");
    refused(|spec| spec.layers = 1025, "layers");
    refused(|spec| spec.dropout = 1.0, "dropout");
    refused(|spec| spec.width = 4096, "heads");
    refused(|spec| spec.norm_epsilon = 0.0, "norm-epsilon");
    refused(|spec| spec.rope_base = 1.0, "rope-base");
    refused(|spec| spec.head_size = 257, "head-size");
    refused(|spec| spec.attention_cap = -1.0, "attention-cap");
    refused(|spec| spec.logit_cap = f64::INFINITY, "logit-cap");
    refused(|spec| spec.untrained_tokens = vec![0], "untrained-tokens");
    for (text, expected) in [
        (
            "llama3:8:1:4",
            "none, or numbers as in linear:factor, llama3:",
        ),
        ("dynamic:2", "none, or numbers as in linear:factor, llama3:"),
        ("longrope:8:1:2:2:2", "2 factors, got 3"),
    ] {
        let spec = GptSpec {
            position: PositionKind::Rope,
            rope_scaling: text.into(),
            ..tiny()
        };
        let error = spec.check().unwrap_err().to_string();
        let expected = format!("`rope-scaling` {text}: expected {expected}");
        assert!(error.starts_with(&expected), "{error}");
    }
    let odd = GptSpec {
        position: PositionKind::Rope,
        head_size: 7,
        ..tiny()
    };
    let error = odd.check().unwrap_err().to_string();
    assert!(
        error.starts_with("`rope-share` 1: expected a share of 7"),
        "{error}"
    );
    let longrope = GptSpec {
        position: PositionKind::Rope,
        rope_scaling: "longrope:4:1:2:2".into(),
        ..tiny()
    };
    let error = longrope.layers(&shape(&[5])).unwrap_err().to_string();
    let expected = "`context` 5: expected at most 4, as the model's `rope-scaling` says";
    assert!(error.starts_with(expected), "{error}");
    let too_few = GptSpec { vocab: 6, ..tiny() };
    let error = too_few.layers(&shape(&[5])).unwrap_err().to_string();
    assert!(error.starts_with("`vocab` 6"), "{error}");
    let unknown = GptSpec {
        position: PositionKind::Rope,
        rope_scaling: "linear:0".into(),
        ..tiny()
    };
    let error = unknown.layers(&shape(&[5])).unwrap_err().to_string();
    assert!(error.starts_with("`rope-scaling` linear:0"), "{error}");
    let error = tiny().layers(&shape(&[6])).unwrap_err().to_string();
    assert!(error.starts_with("`context` 5"), "{error}");
}

/// A model of this spec for `outputs` tokens, with initial weights that are far from uniform.
fn built(spec: &GptSpec, outputs: usize) -> Model {
    let context = [spec.context];
    let shape = DataShape {
        outputs,
        ..shape(&context)
    };
    let layers = Box::new(spec.layers(&shape).unwrap());
    let model = Model::new(layers, &context, DType::F32, Device::Cpu, 1, &|_| true).unwrap();
    let random = &mut ddp_kernels::Random::new(2);
    let values = model.params.values();
    let noise = Tensor::randn(values.shape(), DType::F32, Device::Cpu, random).unwrap();
    ddp_kernels::ops::axpy(values, 0.3, &noise).unwrap();
    model
}

#[test]
fn decoding_gives_the_logits_of_a_forward_and_its_bits_do_not_depend_on_the_tokens_at_a_time() {
    let tokens: Vec<i64> = (0..20).map(|index| index * 5 % 7).collect();
    let size = GptSpec {
        layers: 2,
        context: 20,
        ..tiny()
    };
    let llama = GptSpec {
        norm: NormKind::Rms,
        position: PositionKind::Rope,
        mlp: MlpKind::Swiglu,
        bias: false,
        tied: false,
        ..size.clone()
    };
    let relu2 = GptSpec {
        mlp: MlpKind::Relu2,
        kv_heads: 0,
        dropout: 0.5,
        vocab: 9,
        ..size.clone()
    };
    let families = families(&size);
    for spec in [size, llama, relu2].into_iter().chain(families) {
        let model = built(&spec, 7);
        let x = Tensor::from_slice(&tokens, &[1, 20], Device::Cpu).unwrap();
        let whole = in_pass(&model, false, |mut pass| model.forward(&mut pass, &x));
        let whole = whole.unwrap().to_vec::<f32>().unwrap();
        let vocabulary = whole.len() / 20;
        let mut one_by_one = crate::Decoder::new(&model, 20).unwrap();
        for (index, expected) in whole.chunks(vocabulary).enumerate() {
            let logits = one_by_one.next(&tokens[index..=index]).unwrap();
            let mut at_once = crate::Decoder::new(&model, 20).unwrap();
            assert_eq!(at_once.next(&tokens[..=index]).unwrap(), logits, "{index}");
            let apart = logits.iter().zip(expected).filter(|(a, _)| a.is_finite());
            let apart = apart.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 2e-5, "{spec:?}, token {index}: {apart}");
            assert_eq!(logits[7..], vec![f32::NEG_INFINITY; vocabulary - 7]);
        }
        assert_eq!(one_by_one.room(), 0);
        assert!(crate::Decoder::new(&model, 21).is_err());
    }
}
