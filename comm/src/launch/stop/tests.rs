use ddp_kernels::panics;

use super::*;
use crate::membership::client::tests::client;
use crate::membership::wire::ToLauncher;

/// Signals belong to the whole process: one test at a time catches them.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    panics::lock(&ALONE)
}

fn send(signal: Signal) {
    // SAFETY: to this thread, whose handler runs before the call returns.
    unsafe { libc::raise(signal.number()) };
}

#[test]
fn the_first_signal_is_recorded_while_signals_are_caught() {
    let _alone = alone();
    // A script's background process ignores Ctrl-C, and an ignored signal is left alone.
    let defaults = || Signal::ALL.map(|signal| set(signal.number(), libc::SIG_DFL));
    defaults();
    for (first, second) in [
        (Signal::User1, Signal::Terminate),
        (Signal::Interrupt, Signal::User1),
        (Signal::Quit, Signal::Hangup),
    ] {
        let (stops, others) = (StopSignals::catch(), StopSignals::catch());
        assert_eq!(stops.requested(), None);
        send(first);
        send(second);
        drop(stops);
        assert_eq!(others.requested(), Some(first));
    }
    let now = Signal::ALL.map(|signal| current(signal.number()));
    assert_eq!(now, [Some(libc::SIG_DFL); 5], "nothing is caught any more");
}

#[test]
fn the_launcher_hears_of_a_request_before_anything_else_of_the_process_runs() {
    let _alone = alone();
    for signal in Signal::ALL {
        set(signal.number(), libc::SIG_DFL);
        let (client, launcher) = client(0, 1, &[]);
        client.tell_at_once();
        let _stops = StopSignals::catch();
        send(signal);
        send(Signal::User1);
        // Only this comes next.
        client.end(75);
        assert_eq!(launcher.receive(), Some(ToLauncher::Asked(signal.number())));
        assert_eq!(launcher.receive(), Some(ToLauncher::Ends(75)));
    }
}

#[test]
fn a_signal_that_comes_before_there_is_a_handler_waits_for_it() {
    let _alone = alone();
    set(libc::SIGTERM, libc::SIG_DFL);
    hold_stops();
    // Without being held it would end this process.
    send(Signal::Terminate);
    let stops = StopSignals::catch();
    assert_eq!(stops.requested(), None);
    hear();
    assert_eq!(stops.requested(), Some(Signal::Terminate));
}

#[test]
fn a_signal_that_other_code_handles_is_left_alone() {
    extern "C" fn others(_: c_int) {}
    let _alone = alone();
    set(libc::SIGUSR1, others as *const () as usize);
    let stops = StopSignals::catch();
    send(Signal::User1);
    assert_eq!(stops.requested(), None);
    drop(stops);
    assert_eq!(current(libc::SIGUSR1), Some(others as *const () as usize));
    set(libc::SIGUSR1, libc::SIG_DFL);
}

#[test]
fn sigterm_goes_to_the_program_while_it_catches_signals_and_else_to_the_watch() {
    let _alone = alone();
    set(libc::SIGTERM, libc::SIG_DFL);
    let watch = Termination::catch().expect("nothing else handles it");
    assert!(Termination::catch().is_none());
    let stops = StopSignals::catch();
    send(Signal::Terminate);
    assert_eq!(stops.requested(), Some(Signal::Terminate));
    assert!(!watch.has_come());
    drop(stops);
    assert!(!watch.has_come());
    send(Signal::Terminate);
    assert!(watch.has_come() && !watch.has_come());
    drop(watch);
    assert_eq!(current(libc::SIGTERM), Some(libc::SIG_DFL));
}

#[test]
fn codes_identify_signals() {
    let mut all = Signal::ALL.into_iter();
    assert!(all.all(|signal| Signal::of_code(signal.code()) == Some(signal)));
    assert_eq!((Signal::of_code(0), Signal::of_code(6)), (None, None));
}
