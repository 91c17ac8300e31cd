//! A transformer that a user writes by formulas.

use super::*;

/// A transformer as a user writes it, of the operations of formulas.
#[derive(Debug)]
struct Own(usize);

impl Module for Own {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let (width, time) = (8, x.size(1));
        let attention = Attention {
            time,
            heads: 4,
            kv_heads: 4,
            head_size: width / 4,
            causal: true,
            scale: None,
            window: None,
            cap: None,
        };
        let tie = Tie::new();
        let embedding = Embedding::new(7, width).with_positions(5).tied(&tie);
        let mut x = m.layer("embedding", x, embedding);
        for block in 0..self.0 {
            x = m.within(&format!("{block}"), |m| {
                let normed = m.layer_norm("norm_1", &x);
                let qkv = m.linear("qkv", &normed, 3 * width);
                let mixed = m.attention(&qkv, attention);
                let x = &x + m.linear("out", &mixed, width);
                let normed = m.layer_norm("norm_2", &x);
                let hidden = m.linear("up", &normed, 6).gelu_tanh();
                x + m.linear("down", &hidden, width)
            });
        }
        let x = m.layer_norm("norm", &x);
        m.layer("head", &x, Head::new(7).tied(&tie))
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

/// How many operations run forward and backward in training.
fn runs(layers: Box<dyn Module>) -> [usize; 2] {
    let model = Model::new(layers, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let tokens = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6, 0, 1, 2, 3], &[2, 5], Device::Cpu);
    in_pass(&model, true, |pass| {
        model.forward(&mut pass.leaving_head(true), &tokens.unwrap())
    })
    .unwrap();
    model.run_counts()
}

#[test]
fn a_transformer_of_ones_own_has_as_many_operations_as_the_family() {
    for layers in [1, 3] {
        let spec = GptSpec {
            layers,
            kv_heads: 0,
            ..tiny()
        };
        let family = runs(Box::new(spec.layers(&shape(&[5])).unwrap()));
        assert_eq!(runs(Box::new(Own(layers))), family);
        // Of a block two norms with sums, four linear layers with their activation, attention;
        // backward two of each linear layer, one that computes GELU again, three of each norm.
        assert_eq!(family, [7 * layers + 2, 16 * layers + 6], "{layers} layers");
    }
}
