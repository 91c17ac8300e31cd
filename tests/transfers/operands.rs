//! Operands of operations cross as they are, once each, or not at all.

use super::*;

#[test]
fn a_transposed_view_crosses_as_it_is() {
    on_two_devices(|_| {
        let x = randn(&[3, 5], Device::Cpu);
        let there = x.t().unwrap().to((GPU, DType::F16)).unwrap();
        assert_eq!(
            (there.device(), there.dtype(), there.shape().dims()),
            (GPU, DType::F16, &[5, 3][..])
        );
        let back = there.to((Device::Cpu, DType::F32)).unwrap();
        let expected = x
            .t()
            .unwrap()
            .to_dtype(DType::F16)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        assert_eq!(
            back.to_vec::<f32>().unwrap(),
            expected.to_vec::<f32>().unwrap()
        );
    });
}

#[test]
fn an_operation_under_allow_is_done_whole_or_not_at_all() {
    on_two_devices(|_| {
        let constants = ops::SgdConstants {
            momentum: 0.9,
            nesterov: false,
        };
        let scalars = ops::SgdScalars {
            learning_rate: 0.1,
            weight_decay: 0.0,
        }
        .to_array()
        .unwrap();
        let scalars = Tensor::from_slice(&scalars, &[2], GPU).unwrap();
        let [values, momentum] =
            [1.0, 0.0].map(|v| Tensor::full(&[4], v, DType::F32, Device::Cpu).unwrap());
        let gradients = Tensor::ones(&[4], DType::F32, GPU).unwrap();
        let chunks = ops::ChunkTable::whole(4).without_decay();
        let step = || {
            ops::sgd(
                &ops::UpdateTensors::new([&values, &gradients], &chunks, &scalars),
                Some(&momentum),
                &constants,
            )
        };
        transfer::with_policy(Policy::Allow, || {
            // Another reader holds the momentum, which could not be restored: the values are not
            // updated either.
            let error = momentum
                .with_slice::<f32, _>(|_| step().unwrap_err().to_string())
                .unwrap();
            assert!(
                error.contains("sgd: momentum f32[4] on cpu is being read by with_slice"),
                "{error}"
            );
            assert_eq!(values.to_vec::<f32>().unwrap(), [1.0; 4]);
            step().unwrap();
        });
        assert_eq!(values.to_vec::<f32>().unwrap(), [0.9; 4]);
        assert_eq!(momentum.to_vec::<f32>().unwrap(), [1.0; 4]);
    });
}

fn into(dx: &Tensor, dy: &Tensor, y: &Tensor) -> ddp_kernels::Result<()> {
    ops::activate_backward_into(dx, dy, y, ops::Activation::Relu)
}

#[test]
fn moving_operands_does_not_hide_that_they_overlap_and_moves_each_once() {
    on_two_devices(|ledger| {
        let whole = randn(&[8], Device::Cpu);
        let (out, a, b) = (
            whole.slice(1..5).unwrap(),
            whole.slice(0..4).unwrap(),
            randn(&[4], GPU),
        );
        transfer::with_policy(Policy::Allow, || {
            assert!(matches!(into(&out, &a, &b), Err(Error::Overlap { .. })));
            assert_eq!(ledger.crossed(), (0, 0));
            // In place, and the same tensor as two operands: one upload each time.
            into(&out, &out, &b).unwrap();
            assert_eq!(ledger.crossed(), (2, 32), "up once, and back");
            ledger.clear();
            let (x, there) = (randn(&[4], Device::Cpu), b.empty_like().unwrap());
            into(&there, &x, &x).unwrap();
            assert_eq!(ledger.crossed(), (1, 16));
        });
    });
}
