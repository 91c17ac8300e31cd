//! The processes of ranks: what they say, and what they do because of what they hear.

use super::*;

impl Job<'_> {
    pub(super) fn says(&mut self, index: usize, said: ToLauncher) {
        self.word(index, Word::Said(said));
    }

    pub(super) fn word(&mut self, index: usize, word: Word) {
        let it = &self.processes[index];
        let link = &self.links[it.host];
        if it.host == 0 || link.has_agent && link.agents == it.agent {
            self.send(it.host, 0, Message::Word(index, word));
        }
    }

    pub(super) fn ends(&mut self, index: usize, end: End) {
        if self.processes[index].phase == Phase::Ended {
            return;
        }
        self.processes[index].phase = Phase::Ended;
        let (rank, number) = (self.processes[index].rank, self.processes[index].number);
        self.say(format!("rank {rank}: process {number} {end}"));
        self.outcome.lost += usize::from(end != End::Code(0));
        let generation = self.processes[index].generation;
        if let (Some(together), true) = (self.together.get_mut(&generation), end != End::Code(0)) {
            let code = match end {
                End::Code(code) => code,
                End::Signal(_) => 77,
            };
            together.failed.get_or_insert(code);
        }
        self.word(index, Word::Ended(end));
    }

    /// A process gets a signal to stop, from what has started it or from elsewhere.
    pub(super) fn is_signalled(&mut self, index: usize, signal: i32, is_of_parent: bool) {
        let it = &mut self.processes[index];
        match it.phase {
            Phase::Comes | Phase::Ended => return,
            Phase::Starts => return self.ends(index, End::Signal(signal)),
            _ => it.was_asked = true,
        }
        let seen = &mut it.interrupts[usize::from(is_of_parent)];
        if signal == INTERRUPT && std::mem::replace(seen, true) {
            return self.goes_after(index, Phase::Ends(decide::of_signal(signal)), 1..50);
        }
        if self.processes[index].is_still() {
            return;
        }
        self.asked.get_or_insert(self.now);
        self.says(index, ToLauncher::Asked(signal));
    }

    pub(super) fn shows(&mut self, index: usize) {
        let it = &mut self.processes[index];
        if it.phase == Phase::Ended {
            return;
        }
        self.plan(SIGN, Next::Shows(index));
        let it = &mut self.processes[index];
        if !it.heard.is_welcomed {
            return;
        }
        if it.is_stopped {
            it.stopped_for += SIGN;
            return;
        }
        it.ran += SIGN;
        let [now, stopped] = [it.ran, it.stopped_for].map(Duration::from_millis);
        let ends = it.watch.look(&it.heard, now, stopped);
        if let (Some(code), false) = (ends, self.is_ordinary()) {
            return self.ends(index, End::Code(code));
        }
        let it = &mut self.processes[index];
        if !it.hangs {
            it.progress += u64::from(!matches!(it.phase, Phase::Waits | Phase::Exchanges));
            let said = ToLauncher::Progress(it.progress);
            self.says(index, said);
        }
    }

    pub(super) fn goes_after(&mut self, index: usize, phase: Phase, after: Range<u64>) {
        let it = &mut self.processes[index];
        it.plan += 1;
        (it.phase, it.since) = (phase, self.now);
        let (plan, after) = (it.plan, self.random.of(after));
        self.plan(after, Next::Goes(index, plan));
        self.plan(after + 50, Next::Looks(index, plan));
    }

    /// Waits for the next generation.
    pub(super) fn waits(&mut self, index: usize) {
        let it = &mut self.processes[index];
        it.plan += 1;
        (it.phase, it.waits_since) = (Phase::Waits, self.taken);
        let after = it.generation;
        self.says(index, ToLauncher::Waits { after, port: 1 });
        self.follows(index);
    }

    pub(super) fn hears(&mut self, index: usize, message: ToRank) {
        let it = &mut self.processes[index];
        it.heard.hear(Some(message.clone()));
        let current = it.heard.generation.as_ref().map(|it| it.number);
        if matches!(message, ToRank::Over(over) if Some(over) == current) && !it.heard.is_over() {
            return self.wrong("a rank does not know that its generation is over".into());
        }
        self.follows(index);
    }

    /// A process does what follows from what it has heard. One that starts does so later. Where one
    /// hangs, only its threads hear.
    fn follows(&mut self, index: usize) {
        let it = &mut self.processes[index];
        if it.hangs {
            return;
        }
        if it.phase == Phase::Waits {
            match it.heard.meeting(it.generation) {
                Some(MeetingOutcome::Formed(formed)) => {
                    it.generation = formed.number;
                    self.goes_after(index, Phase::Connects, 5..40);
                }
                Some(MeetingOutcome::JobEnds(code)) => {
                    self.goes_after(index, Phase::Ends(code), 1..50);
                }
                None => {}
            }
        } else if it.takes_part() {
            match it.heard.calls_end() {
                Some(CallsEnd::Generation) => self.waits(index),
                Some(CallsEnd::Job(code)) => self.goes_after(index, Phase::Ends(code), 1..50),
                None => {}
            }
        }
    }
}
