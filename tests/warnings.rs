//! Under `Policy::Warn` each source line that moves operands warns once, through `tracing`. The
//! subscriber belongs to the process, so this test is the only one in its file.

use std::sync::Mutex;

use ddp_kernels::transfer::{self, Ledger, Policy};
use ddp_kernels::{DType, Device, Tensor, ops};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Keeps the warnings it receives; compiling a kernel logs too, at a lower level.
struct Listener;

static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Visit for Listener {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        HEARD.lock().unwrap().push(format!("{value:?}"));
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut Listener);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn each_line_warns_once_and_counts_every_time() {
    tracing::subscriber::set_global_default(Listener).unwrap();
    if !ddp_tests::gpus(1) {
        return;
    }
    let there = Tensor::ones(&[4], DType::F32, Device::Cuda(0)).unwrap();
    let batch = Tensor::ones(&[4], DType::F32, Device::Cpu)
        .unwrap()
        .named("batch");
    let ledger = Ledger::new();
    transfer::with_ledger(&ledger, || {
        transfer::with_policy(Policy::Warn, || {
            for _ in 0..5 {
                ops::axpy(&there, 1.0, &batch).unwrap();
            }
            let relu = ops::Activation::Relu;
            ops::activate_backward_into(&there, &there, &batch, relu).unwrap();
        });
        transfer::with_policy(Policy::Allow, || ops::axpy(&there, 1.0, &batch).unwrap());
    });
    let heard = HEARD.lock().unwrap();
    assert_eq!(heard.len(), 2, "{heard:?}");
    assert!(
        heard[0].contains(
            "axpy: the policy moved x \"batch\" f32[4] on cpu to cuda:0 at tests/warnings.rs:"
        ),
        "{heard:?}"
    );
    assert!(
        heard[1].starts_with("activate_backward: the policy moved"),
        "{heard:?}"
    );
    assert_eq!(ledger.crossed().0, 7);
}
