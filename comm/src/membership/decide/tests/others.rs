//! Whatever ranks and agents say, in any order: the launcher neither panics nor takes a number that
//! it does not know for a rank.

use proptest::prelude::*;

use super::*;

fn number() -> impl Strategy<Value = usize> {
    prop_oneof![0..5usize, Just(usize::MAX)]
}

fn process() -> impl Strategy<Value = u32> {
    prop_oneof![1..9u32, Just(0), Just(u32::MAX)]
}

fn said() -> impl Strategy<Value = ToLauncher> {
    let misses = (
        process(),
        prop::collection::vec(number(), 0..4),
        any::<bool>(),
    );
    prop_oneof![
        (process(), any::<u16>()).prop_map(|(after, port)| ToLauncher::Waits { after, port }),
        any::<u64>().prop_map(ToLauncher::Progress),
        any::<i32>().prop_map(ToLauncher::Asked),
        misses.prop_map(|(generation, ranks, have_met)| ToLauncher::Misses {
            generation,
            ranks,
            have_met,
        }),
        any::<u8>().prop_map(ToLauncher::Ends),
    ]
}

/// What the launcher makes of a message: of ranks that it has started, as it checks before.
fn event() -> impl Strategy<Value = JobEvent> {
    let end = prop_oneof![
        any::<u8>().prop_map(End::Code),
        (1..64i32).prop_map(End::Signal)
    ];
    let rank = 0..3usize;
    let host = 1..3usize;
    prop_oneof![
        (rank.clone(), process(), said()).prop_map(|(rank, of, it)| JobEvent::Said(rank, of, it)),
        (rank.clone(), process(), end).prop_map(|(rank, of, it)| JobEvent::Ended(rank, of, it)),
        (rank, process(), any::<bool>()).prop_map(|(rank, of, it)| JobEvent::Stopped(rank, of, it)),
        any::<i32>().prop_map(JobEvent::Asked),
        host.clone().prop_map(JobEvent::HostHeard),
        host.clone().prop_map(JobEvent::HostGone),
        host.clone().prop_map(|host| JobEvent::HostCame {
            host,
            address: None
        }),
        host.prop_map(|host| JobEvent::HostRefused {
            host,
            why: "\u{1b}[2J".into()
        }),
        Just(JobEvent::Tick),
    ]
}

proptest! {
    #[test]
    fn whatever_ranks_and_agents_say_the_launcher_decides(
        events in prop::collection::vec((event(), 0..5000u64), 0..60),
    ) {
        let mut job = job(&[0, 1, 2]);
        let mut now_ms = 0;
        for (event, after_ms) in events {
            now_ms += after_ms;
            job.now = Duration::from_millis(now_ms);
            job.handle(event);
            let ranks = job.state.ranks.len();
            for action in &job.actions {
                if let JobAction::Start { rank, .. } | JobAction::Kill { rank, .. }
                    | JobAction::Tell { rank, .. } = action {
                    prop_assert!(*rank < ranks, "{action:?}");
                }
            }
        }
    }

    /// What others send is parsed or dropped.
    #[test]
    fn messages_that_were_changed_are_parsed_or_dropped(
        at in any::<prop::sample::Index>(),
        bytes in prop::collection::vec(any::<u8>(), 0..5),
        said in said(),
    ) {
        let mut text = serde_json::to_vec(&said).unwrap();
        let at = at.index(text.len());
        let end = text.len().min(at + bytes.len().max(1));
        text.splice(at..end, bytes);
        _ = serde_json::from_slice::<ToLauncher>(&text);
        _ = serde_json::from_slice::<super::super::super::wire::ToRank>(&text);
    }
}
