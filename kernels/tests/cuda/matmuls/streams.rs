//! Matmuls in captures, on several streams and threads, and what is refused.

use ddp_kernels::graph::Graph;
use ddp_kernels::ops::{self, Activation, F32Math, with_f32_math};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Error, Tensor};

use super::{Layer, normals, placed, values};
use crate::{assert_same_bits, devices};

/// One layer's forward and backward; all that it writes.
fn step(device: Device, dtype: DType) -> (impl Fn() -> Result<(), Error>, Vec<Tensor>) {
    let [m, n, k] = [96, 80, 72];
    let layer = Layer::new([m, n, k], dtype, true, true, 0, device);
    let dy = placed(&normals(&[m, n], dtype, 41), 0, device);
    let [dw, db, dx] = [vec![n, k], vec![n], vec![m, k]]
        .map(|shape| Tensor::zeros(&shape, dtype, device).unwrap());
    let written = vec![
        layer.y.clone(),
        layer.pre.clone().unwrap(),
        dw.clone(),
        db.clone(),
        dx.clone(),
    ];
    let body = move || {
        let Layer {
            x,
            weight,
            bias,
            pre,
            y,
        } = &layer;
        ops::linear_into(
            y,
            x,
            weight,
            bias.as_ref(),
            Some(Activation::GeluTanh),
            pre.as_ref(),
        )?;
        ops::linear_backward_weight_into(&dw, Some(&db), &dy, x, false)?;
        ops::linear_backward_input_into(&dx, &dy, weight, Some((Activation::Relu, x)))
    };
    (body, written)
}

fn copies(written: &[Tensor]) -> Vec<Tensor> {
    written
        .iter()
        .map(|tensor| tensor.to(Device::Cpu).unwrap())
        .collect()
}

#[test]
fn a_captured_step_has_the_eager_steps_bits_at_every_launch() {
    for (device, dtype) in devices()
        .into_iter()
        .flat_map(|device| [DType::F32, DType::BF16].map(|dtype| (device, dtype)))
    {
        let (body, written) = step(device, dtype);
        let stream = Stream::new(device).unwrap();
        stream
            .wait(&Stream::default_of(device).unwrap().record().unwrap())
            .unwrap();
        stream.scope(&body).unwrap();
        let eager = stream.scope(|| copies(&written));
        let graph = Graph::capture(&stream, &body).unwrap();
        for _ in 0..3 {
            stream.scope(|| {
                written
                    .iter()
                    .for_each(|tensor| ops::fill_into(tensor, 7.0).unwrap())
            });
            graph.launch().unwrap();
            for (got, eager) in stream.scope(|| copies(&written)).iter().zip(&eager) {
                assert_same_bits(got, eager, &format!("{dtype}, captured"));
            }
        }
    }
}

#[test]
fn a_new_matmul_in_a_capture_is_refused_with_help() {
    for device in devices() {
        let stream = Stream::new(device).unwrap();
        stream
            .wait(&Stream::default_of(device).unwrap().record().unwrap())
            .unwrap();
        // A shape that no other test has.
        let [out, a, b] = stream.scope(|| {
            [[3, 1021], [3, 31], [31, 1021]].map(|s| Tensor::ones(&s, DType::F32, device).unwrap())
        });
        let error =
            Graph::capture(&stream, || ops::addmm_into(&out, &out, &a, &b, 1.0, 0.0)).unwrap_err();
        let message = error.to_string();
        assert!(
            matches!(error, Error::Capture { .. })
                && message.contains("run the step once before you capture it"),
            "{message}"
        );
        // The stream is usable again.
        stream
            .scope(|| ops::addmm_into(&out, &out, &a, &b, 1.0, 0.0))
            .unwrap();
        assert_eq!(stream.scope(|| values(&out))[..2], [31.0, 31.0]);
    }
}

#[test]
fn streams_at_work_at_the_same_time_do_not_share_a_workspace() {
    for device in devices() {
        let streams: Vec<Stream> = (0..3).map(|_| Stream::new(device).unwrap()).collect();
        let steps: Vec<_> = (0..3).map(|_| step(device, DType::F32)).collect();
        let made = Stream::default_of(device).unwrap().record().unwrap();
        for stream in &streams {
            stream.wait(&made).unwrap();
        }
        for _ in 0..3 {
            for (stream, (body, _)) in streams.iter().zip(&steps) {
                stream.scope(body).unwrap();
            }
        }
        let results: Vec<_> = streams
            .iter()
            .zip(&steps)
            .map(|(stream, (_, written))| stream.scope(|| copies(written)))
            .collect();
        for (first, other) in results[0]
            .iter()
            .zip(&results[1])
            .chain(results[0].iter().zip(&results[2]))
        {
            assert_same_bits(other, first, "the same step on another stream");
        }
    }
}

#[test]
fn threads_make_matmuls_of_one_device_at_the_same_time() {
    for device in devices() {
        let run = || {
            let (body, written) = step(device, DType::F32);
            for _ in 0..4 {
                body().unwrap();
            }
            copies(&written)
        };
        let results: Vec<Vec<Tensor>> = std::thread::scope(|scope| {
            [(); 4]
                .map(|()| scope.spawn(run))
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        for other in &results[1..] {
            for (got, expected) in other.iter().zip(&results[0]) {
                assert_same_bits(got, expected, "the same step on another thread");
            }
        }
    }
}

/// A relu is tried on NaN before the first matmul of its kind, with the stream's workspace. In a
/// process of its own: the simulator makes the first calls of a process wait for other threads.
#[test]
fn threads_make_the_first_relu_matmuls_of_a_stream_in_turn() {
    const CHILD: &str = "DDP_TEST_FIRST_RELU";
    let Some(&device) = devices().first() else {
        return;
    };
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "matmuls::streams::threads_make_the_first_relu_matmuls_of_a_stream_in_turn",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{said}");
        return;
    }
    let run = |rows: usize| {
        let layer = Layer::new([rows, 64, 48], DType::F32, true, false, 0, device);
        layer.forward(Some(Activation::Relu));
        let on_cpu = Layer::new([rows, 64, 48], DType::F32, true, false, 0, Device::Cpu);
        on_cpu.forward(Some(Activation::Relu));
        let [got, expected] = [layer.y, on_cpu.y].map(|y| y.to_vec::<f32>().unwrap());
        let is_near = |(got, expected): (&f32, &f32)| (got - expected).abs() <= 1e-4;
        assert!(got.iter().zip(&expected).all(is_near), "{rows} rows");
    };
    std::thread::scope(|scope| {
        for rows in [33, 65, 97, 129] {
            scope.spawn(move || run(rows));
        }
    });
}

#[test]
fn dtypes_that_do_not_fit_are_refused_with_what_there_is() {
    for device in devices() {
        let ones = |shape: &[usize], dtype| Tensor::ones(shape, dtype, device).unwrap();
        let wide = ones(&[2, 2], DType::F64);
        let error = ops::addmm(&wide, &wide, &wide, 1.0, 1.0)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("there is no version for f64") && error.contains("f32, bf16 on cuda"),
            "{error}"
        );
        let (half, other) = (ones(&[2, 2], DType::BF16), ones(&[2, 2], DType::F16));
        let error = ops::linear_backward_weight_into(&other, None, &half, &half, false)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("dw f16[2, 2]") && error.contains("expected dtype bf16"),
            "{error}"
        );
        let single = ones(&[2, 2], DType::F32);
        let error = ops::linear_into(&single, &half, &half, None, None, None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("y f32[2, 2]") && error.contains("expected dtype bf16"),
            "{error}"
        );
    }
}

#[test]
fn environment_variables_that_lower_f32_precision_are_refused() {
    const CHILD: &str = "DDP_TEST_EMULATED";
    let Some(&device) = devices().first() else {
        return;
    };
    let matmul = |math| {
        let one = Tensor::ones(&[4, 4], DType::F32, device).unwrap();
        with_f32_math(math, || ops::addmm(&one, &one, &one, 1.0, 0.0))
    };
    if std::env::var_os(CHILD).is_some() {
        let error = matmul(F32Math::Strict).unwrap_err().to_string();
        assert!(
            error.contains("CUBLAS_EMULATE_SINGLE_PRECISION") && error.contains("Unset it"),
            "{error}"
        );
        matmul(F32Math::Tf32).unwrap();
        return;
    }
    matmul(F32Math::Strict).unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "matmuls::streams::environment_variables_that_lower_f32_precision_are_refused",
            "--nocapture",
        ])
        .env(CHILD, "1")
        .env("CUBLAS_EMULATE_SINGLE_PRECISION", "1")
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "{}",
        String::from_utf8_lossy(&child.stderr)
    );
}
