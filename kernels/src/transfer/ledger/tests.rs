//! Collectives and graphs in the ledger. Other claims about the ledger: tests/transfers.rs.

use crate::graph::Graph;
use crate::stream::Stream;
use crate::transfer::{
    Policy, announced, book_collective, forbid_transfers, in_phase, with_ledger, with_policy,
};
use crate::{DType, Device, Error, Tensor, ops};

use super::*;

#[track_caller]
fn here() -> Site {
    std::panic::Location::caller()
}

/// Phase, kind, count and bytes of each row.
fn seen(ledger: &Ledger) -> Vec<(Phase, TransferKind, u64, u64)> {
    ledger
        .rows()
        .iter()
        .map(|row| (row.phase, row.kind, row.count, row.bytes))
        .collect()
}

#[test]
fn collectives_are_booked_by_line_and_phase_and_cross_nothing() {
    let ledger = Ledger::new();
    let given = Tensor::zeros(&[10], DType::F32, Device::Cpu).unwrap();
    let first = here();
    let second = here();
    with_ledger(&ledger, || {
        book_collective(&given, first);
        in_phase(Phase::Step, || {
            (0..3).for_each(|_| book_collective(&given, first));
            book_collective(&given.slice(0..2).unwrap(), second);
        });
    });
    let kind = TransferKind::Collective;
    let expected = [(Phase::Setup, kind, 1, 40), (Phase::Step, kind, 3, 120)];
    assert_eq!(
        seen(&ledger),
        [&expected[..], &[(Phase::Step, kind, 1, 8)]].concat()
    );
    assert_eq!(ledger.crossed(), (0, 0));
    let json = ledger.to_json();
    assert_eq!(json["rows"][1]["kind"], "between ranks");
    assert_eq!(json["rows"][1]["to"], "ranks");
    let table = ledger.to_string();
    assert!(
        table
            .lines()
            .nth(2)
            .is_some_and(|line| line.contains("ranks") && line.contains("120 B")),
        "{table}"
    );
}

#[test]
fn collectives_are_never_refused_and_give_no_hints() {
    let ledger = Ledger::new();
    let given = Tensor::zeros(&[1], DType::F32, Device::Cpu).unwrap();
    let site = here();
    with_ledger(&ledger, || {
        with_policy(Policy::Forbid, || {
            forbid_transfers(|| {
                in_phase(Phase::Step, || {
                    (0..1_000).for_each(|_| book_collective(&given, site))
                })
            });
        });
    });
    assert_eq!(
        seen(&ledger),
        [(Phase::Step, TransferKind::Collective, 1_000, 4_000)]
    );
    assert!(ledger.hints().is_empty(), "{:?}", ledger.hints());
}

#[test]
fn what_is_held_is_booked_at_each_launch_under_its_phase() {
    let site = here();
    let key = |kind: TransferKind, phase: Phase| {
        let (source, target) = (Device::Cuda(0), Device::Cuda(1));
        LedgerKey {
            kind,
            phase,
            source,
            target,
            implicit: false,
            site,
        }
    };
    let bytes = |bytes: usize| Crossed::one(bytes, Some("why"));
    let mut held = CapturedRows::default();
    held.hold(key(TransferKind::Collective, Phase::Setup), bytes(100));
    held.hold(key(TransferKind::Collective, Phase::Setup), bytes(20));
    held.hold(key(TransferKind::Peer, Phase::Setup), bytes(3));
    let ledger = Ledger::new();
    ledger.book_held(&CapturedRows::default(), Phase::Step);
    assert!(ledger.rows().is_empty());
    (0..5).for_each(|_| ledger.book_held(&held, Phase::Step));
    ledger.book_held(&held, Phase::Log);
    let expected = [
        (Phase::Step, TransferKind::Collective, 10, 600),
        (Phase::Step, TransferKind::Peer, 5, 15),
        (Phase::Log, TransferKind::Collective, 2, 120),
        (Phase::Log, TransferKind::Peer, 1, 3),
    ];
    assert_eq!(seen(&ledger), expected);
    assert!(ledger.rows().iter().all(|row| row.announced == Some("why")));
}

#[test]
fn transfers_are_counted_at_each_launch_not_at_capture() {
    let Some(device) = Device::usable()
        .into_iter()
        .find(|device| device.is_accelerator())
    else {
        ddp_testing::skip("no CUDA device");
        return;
    };
    let ledger = Ledger::new();
    with_ledger(&ledger, || {
        let x = Tensor::zeros(&[100], DType::F32, device).unwrap();
        let stream = Stream::new(device).unwrap();
        let site = here();
        let body = || {
            ops::scale_into(&x, &x, 2.0)?;
            announced("gradients", || book_collective(&x, site));
            book_collective(&x.slice(0..10)?, site);
            Ok::<(), Error>(())
        };
        stream.scope(body).unwrap();
        assert_eq!(
            seen(&ledger),
            [(Phase::Setup, TransferKind::Collective, 2, 440)]
        );
        let graph = Graph::capture(&stream, body).unwrap();
        assert_eq!(
            seen(&ledger),
            [(Phase::Setup, TransferKind::Collective, 2, 440)],
            "capturing moves nothing"
        );
        in_phase(Phase::Step, || (0..3).for_each(|_| graph.launch().unwrap()));
        let expected = [
            (Phase::Setup, TransferKind::Collective, 2, 440),
            (Phase::Step, TransferKind::Collective, 6, 1_320),
        ];
        assert_eq!(seen(&ledger), expected);
        // After a capture the thread books at once again, also where the capture failed.
        let fails = || {
            book_collective(&x, site);
            Err(Error::value("test", "x", "nothing", "this"))
        };
        assert!(Graph::capture(&stream, fails).is_err());
        assert_eq!(seen(&ledger), expected);
        in_phase(Phase::Step, || book_collective(&x, site));
        assert_eq!(
            seen(&ledger)[1],
            (Phase::Step, TransferKind::Collective, 7, 1_720)
        );
        // Launched by whoever, booked in the ledger of the one who launches.
        let other = Ledger::new();
        with_ledger(&other, || graph.launch().unwrap());
        assert_eq!(
            seen(&other),
            [(Phase::Setup, TransferKind::Collective, 2, 440)]
        );
        stream.synchronize().unwrap();
    });
}
