//! Graphs: captured once, launched many times, over memory that they keep.

use ddp_kernels::graph::{Graph, NodeCounts};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Error, Tensor, memory, ops};

use crate::devices;

const COUNT: usize = 5_000;

fn filled(value: f64, device: Device) -> Tensor {
    Tensor::full(&[COUNT], value, DType::F32, device).unwrap()
}

fn first(tensor: &Tensor) -> f64 {
    tensor.slice(0..1).unwrap().item().unwrap()
}

/// A stream that comes after everything given to the default one so far.
fn stream_after_default(device: Device) -> Stream {
    let stream = Stream::new(device).unwrap();
    stream
        .wait(&Stream::default_of(device).unwrap().record().unwrap())
        .unwrap();
    stream
}

#[test]
fn a_captured_sequence_runs_at_each_launch_and_not_before() {
    for device in devices() {
        let (x, one) = (filled(0.0, device), filled(1.0, device));
        let stream = stream_after_default(device);
        let body = || ops::axpy(&x, 1.0, &one).and_then(|()| ops::scale_into(&x, &x, 2.0));
        stream.scope(body).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
        let graph = Graph::capture(&stream, body).unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0, "capturing runs nothing");
        for expected in [6.0, 14.0, 30.0] {
            graph.launch().unwrap();
            assert_eq!(stream.scope(|| first(&x)), expected);
        }
        assert_eq!(graph.device(), device);
    }
}

#[test]
fn a_graph_of_nothing_launches() {
    for device in devices() {
        let graph = Graph::capture(&stream_after_default(device), || Ok::<_, Error>(())).unwrap();
        assert_eq!(graph.counts(), NodeCounts::default());
        graph.launch().unwrap();
    }
}

#[test]
fn what_varies_is_read_from_tensors_at_each_launch() {
    for device in devices() {
        let (x, step) = (filled(0.0, device), filled(1.0, device));
        let stream = stream_after_default(device);
        let body = || ops::axpy(&x, 1.0, &step);
        stream.scope(body).unwrap();
        let graph = Graph::capture(&stream, body).unwrap();
        for value in [10.0, 100.0] {
            stream.scope(|| ops::fill_into(&step, value)).unwrap();
            graph.launch().unwrap();
        }
        assert_eq!(stream.scope(|| first(&x)), 111.0);
    }
}

#[test]
fn streams_join_a_capture_by_its_events_and_leave_it_by_theirs() {
    for device in devices() {
        let (a, b, sum) = (
            filled(1.0, device),
            filled(2.0, device),
            filled(0.0, device),
        );
        let (main, side) = (stream_after_default(device), stream_after_default(device));
        let body = || {
            side.wait(&main.record()?)?;
            side.scope(|| ops::scale_into(&b, &b, 3.0))?;
            ops::scale_into(&a, &a, 2.0)?;
            main.wait(&side.record()?)?;
            ops::axpy(&sum, 1.0, &a)?;
            ops::axpy(&sum, 1.0, &b)
        };
        main.scope(body).unwrap();
        let graph = Graph::capture(&main, body).unwrap();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(main.scope(|| first(&sum)), 8.0 + 22.0 + 62.0);
        // The side stream is its own again.
        side.wait(&main.record().unwrap()).unwrap();
        side.scope(|| ops::fill_into(&b, 1.0)).unwrap();
        assert_eq!(side.scope(|| first(&b)), 1.0);
    }
}

#[test]
fn what_a_graph_cannot_hold_is_refused_by_name_and_leaves_the_stream_usable() {
    for device in devices() {
        let x = filled(1.0, device);
        let stream = stream_after_default(device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        type Attempt<'a> = (&'a str, Box<dyn Fn() -> Result<(), Error> + 'a>);
        let attempts: [Attempt<'_>; 5] = [
            (
                "cannot allocate",
                Box::new(|| Tensor::empty(&[3], DType::F32, device).map(drop)),
            ),
            (
                "a graph cannot copy from",
                Box::new(|| x.to_vec::<f32>().map(drop)),
            ),
            (
                "call item() after the launch",
                Box::new(|| x.slice(0..1)?.item().map(drop)),
            ),
            (
                "pinned memory",
                Box::new(|| Tensor::zeros_pinned(&[3 << 20], DType::F64).map(drop)),
            ),
            (
                "one capture at a time",
                Box::new(|| Graph::capture(&stream, || Ok::<(), Error>(())).map(drop)),
            ),
        ];
        for (words, attempt) in attempts {
            let error = Graph::capture(&stream, || {
                ops::scale_into(&x, &x, 1.0)?;
                attempt()
            });
            let error = error.expect_err(words);
            assert!(
                matches!(error, Error::Capture { .. }) && error.to_string().contains(words),
                "{error}"
            );
            stream.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        }
        assert_eq!(
            stream.scope(|| first(&x)),
            32.0,
            "and none of what was captured ran"
        );
    }
}

#[test]
fn a_panic_in_a_capture_ends_it() {
    for device in devices() {
        let x = filled(1.0, device);
        let stream = stream_after_default(device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Graph::capture(&stream, || -> Result<(), Error> {
                ops::scale_into(&x, &x, 5.0)?;
                panic!("on purpose")
            })
        }));
        assert!(outcome.is_err());
        stream.scope(|| ops::scale_into(&x, &x, 2.0)).unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
    }
}

/// Whether a tensor of this name is alive, or its memory is kept. Other tests run meanwhile: totals
/// would tell nothing.
fn is_kept(name: &str, device: Device) -> bool {
    memory::largest_live(device, usize::MAX)
        .iter()
        .any(|live| live.tensor.name.as_deref() == Some(name))
}

#[test]
fn a_graph_keeps_the_memory_of_tensors_that_are_gone() {
    for device in devices() {
        let stream = stream_after_default(device);
        let total = filled(0.0, device);
        let graph = {
            let (x, y) = (
                filled(3.0, device).named("kept input"),
                filled(0.0, device).named("kept output"),
            );
            let body = || ops::scale_into(&y, &x, 2.0).and_then(|()| ops::axpy(&total, 1.0, &y));
            stream.scope(body).unwrap();
            assert!(x.is_only_handle());
            let graph = Graph::capture(&stream, body).unwrap();
            assert!(x.is_only_handle(), "a graph is not a handle");
            graph
        };
        // Whatever else is made gets other memory.
        let others: Vec<Tensor> = (0..4).map(|_| filled(1e9, device)).collect();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| first(&total)), 18.0);
        drop(others);
        assert!(is_kept("kept input", device) && is_kept("kept output", device));
        drop(graph);
        assert!(!is_kept("kept input", device) && !is_kept("kept output", device));
    }
}

#[test]
fn tensors_dropped_during_a_capture_are_freed_after_it() {
    for device in devices() {
        let stream = stream_after_default(device);
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let bystander = stream.scope(|| filled(2.0, device)).named("bystander");
        let graph = Graph::capture(&stream, || {
            drop(bystander);
            ops::scale_into(&x, &x, 2.0)
        })
        .unwrap();
        assert!(!is_kept("bystander", device));
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
        // What was put off has been given to the driver: the next one may have the memory, in its
        // order.
        let next = stream.scope(|| filled(5.0, device));
        assert_eq!(stream.scope(|| first(&next)), 5.0);
    }
}

#[test]
fn a_first_use_on_the_captured_stream_must_have_come_before() {
    for device in devices() {
        let stream = stream_after_default(device);
        let stranger = filled(1.0, device);
        let error =
            Graph::capture(&stream, || ops::scale_into(&stranger, &stranger, 2.0)).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("run the step once on this stream before the capture"),
            "{error}"
        );
    }
    let cpu = Stream::new(Device::Cpu).unwrap();
    let error = Graph::capture(&cpu, || Ok::<(), Error>(()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("a stream of a GPU"), "{error}");
}

#[test]
fn other_threads_can_use_a_stream_during_its_capture() {
    for device in devices() {
        let stream = stream_after_default(device);
        let (x, y) = (filled(1.0, device), filled(1.0, device));
        stream
            .scope(|| ops::scale_into(&x, &x, 1.0).and_then(|()| ops::scale_into(&y, &y, 1.0)))
            .unwrap();
        let graph = Graph::capture(&stream, || {
            ops::scale_into(&x, &x, 2.0)?;
            // All this happens now, on the stream itself, and none of it is in the graph.
            std::thread::scope(|scope| {
                let work = || {
                    stream.scope(|| ops::scale_into(&y, &y, 3.0)).unwrap();
                    drop(stream.scope(|| filled(7.0, device)));
                    assert_eq!(stream.scope(|| first(&y)), 3.0);
                    stream.synchronize().unwrap();
                };
                scope.spawn(work).join().unwrap();
            });
            ops::scale_into(&x, &x, 5.0)
        })
        .unwrap();
        assert_eq!(stream.scope(|| (first(&x), first(&y))), (1.0, 3.0));
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| (first(&x), first(&y))), (10.0, 3.0));
    }
}

#[test]
fn an_event_captured_in_a_graph_is_unusable_outside() {
    for device in devices() {
        let stream = stream_after_default(device);
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let mut place = None;
        let graph = Graph::capture(&stream, || {
            ops::scale_into(&x, &x, 2.0)?;
            let event = stream.record()?;
            assert!(!event.is_done() && event.synchronize().is_err());
            let waited = std::thread::scope(|scope| {
                scope
                    .spawn(|| Stream::default_of(device).unwrap().wait(&event))
                    .join()
                    .unwrap()
            });
            let text = waited.unwrap_err().to_string();
            assert!(
                text.contains("CUDA_ERROR_CAPTURED_EVENT") && text.contains("graphs.rs"),
                "{text}"
            );
            place = Some(event);
            // Nor may the thread that captures wait for what is only being written down.
            assert!(stream.synchronize().is_err());
            Ok::<(), Error>(())
        })
        .unwrap();
        assert!(stream.wait(&place.unwrap()).is_err(), "the capture is over");
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
    }
}

#[test]
fn synchronising_a_device_during_a_capture_is_refused() {
    for device in devices() {
        let stream = stream_after_default(device);
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let graph = Graph::capture(&stream, || {
            let other = || {
                let error = ddp_kernels::stream::synchronize(device)
                    .unwrap_err()
                    .to_string();
                assert!(
                    error.contains("this call cannot run while a graph is captured"),
                    "{error}"
                );
                memory::empty_cache(device);
                memory::empty_cache(Device::Cpu);
            };
            std::thread::scope(|scope| scope.spawn(other).join().unwrap());
            ops::scale_into(&x, &x, 2.0)
        })
        .unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
    }
}

#[test]
fn work_on_a_stream_outside_the_capture_is_refused() {
    for device in devices() {
        let (stream, outsider) = (stream_after_default(device), stream_after_default(device));
        let x = filled(1.0, device);
        for stream in [&stream, &outsider] {
            stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
            stream.synchronize().unwrap();
        }
        let error = Graph::capture(&stream, || outsider.scope(|| ops::scale_into(&x, &x, 2.0)))
            .unwrap_err();
        assert!(
            error.to_string().contains("not part of the capture"),
            "{error}"
        );
    }
}

#[test]
fn a_launch_comes_after_and_before_the_current_stream_s_work() {
    for device in devices() {
        let stream = stream_after_default(device);
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        Stream::default_of(device)
            .unwrap()
            .wait(&stream.record().unwrap())
            .unwrap();
        let graph = Graph::capture(&stream, || ops::scale_into(&x, &x, 2.0)).unwrap();
        for round in 1..5 {
            // Written, launched and read on the default stream, without an event of ours.
            ops::fill_into(&x, f64::from(round)).unwrap();
            graph.launch().unwrap();
            assert_eq!(first(&x), f64::from(2 * round));
        }
    }
}

#[test]
fn matmuls_of_a_joined_stream_and_its_own_do_not_meet() {
    for device in devices() {
        let (main, side) = (stream_after_default(device), stream_after_default(device));
        let matrix = |value: f64| Tensor::full(&[40, 40], value, DType::F32, device).unwrap();
        let (a, b, c) = (matrix(1.0), matrix(0.0), matrix(0.0));
        let matmul = |out: &Tensor| ops::addmm_into(out, out, &a, &a, 1.0, 0.0);
        let body = || {
            side.wait(&main.record()?)?;
            side.scope(|| matmul(&b))?;
            main.wait(&side.record()?)
        };
        main.scope(body).unwrap();
        side.scope(|| matmul(&c)).unwrap();
        let graph = Graph::capture(&main, body).unwrap();
        for _ in 0..3 {
            graph.launch().unwrap();
            side.scope(|| matmul(&c)).unwrap();
        }
        side.synchronize().unwrap();
        main.synchronize().unwrap();
        assert_eq!(side.scope(|| first(&c.reshape(&[1600]).unwrap())), 40.0);
    }
}

#[test]
fn graphs_launch_no_graphs_and_a_body_that_fails_leaves_nothing() {
    for device in devices() {
        let stream = stream_after_default(device);
        let x = filled(1.0, device);
        stream.scope(|| ops::scale_into(&x, &x, 1.0)).unwrap();
        let inner = Graph::capture(&stream, || ops::scale_into(&x, &x, 2.0)).unwrap();
        let error = Graph::capture(&stream, || inner.launch()).unwrap_err();
        assert!(
            error.to_string().contains("a graph cannot launch another"),
            "{error}"
        );
        for _ in 0..5 {
            let failing = || {
                ops::scale_into(&x, &x, 3.0)
                    .and_then(|()| Tensor::zeros(&[1], DType::F32, device).map(drop))
            };
            Graph::capture(&stream, failing).unwrap_err();
        }
        inner.launch().unwrap();
        assert_eq!(stream.scope(|| first(&x)), 2.0);
    }
}
