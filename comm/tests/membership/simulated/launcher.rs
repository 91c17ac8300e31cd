//! The launcher: what it decides, and what it does because of that.

use super::*;

impl Job<'_> {
    pub(super) fn decide(&mut self, event: JobEvent) {
        let now = Duration::from_millis(self.now - self.suspended);
        let was_over = self.state.over_since.is_some();
        if self.state.ends.is_none() {
            self.decided = self.state.failure;
        }
        let actions = decide::on(&mut self.state, now, event);
        if !was_over && self.state.over_since.is_some() {
            self.judge_end_of_generation(&actions);
        }
        for action in actions {
            self.carry_out(action);
        }
        for connection in std::mem::take(&mut self.not_let_in) {
            self.is_not_in(connection);
        }
        self.judge_agents();
    }

    fn carry_out(&mut self, action: JobAction) {
        match action {
            JobAction::Start { rank, process, why } => {
                let host = self.state.ranks[rank].host;
                self.say(format!(
                    "rank {rank}: process {process} is started on host {host}, because {why}"
                ));
                self.judge_start(rank, host);
                self.processes.push(Process {
                    rank,
                    number: process,
                    host,
                    agent: self.links[host].agents,
                    heard: Heard::default(),
                    watch: RankWatch::new(self.state.rules.timeout, host > 0),
                    ran: 0,
                    stopped_for: 0,
                    unheard: VecDeque::new(),
                    phase: Phase::Comes,
                    plan: 0,
                    is_stopped: false,
                    stopped_at: 0,
                    went_on: None,
                    hangs: false,
                    unwell_until: 0,
                    last_word: 0,
                    waits_since: 0,
                    generation: 0,
                    run: None,
                    has_begun: false,
                    stage: Stage::Agrees,
                    round: 0,
                    progress: 0,
                    was_asked: false,
                    interrupts: [false; 2],
                    fails_to_start: std::mem::take(&mut self.fails_to_start[rank]),
                    since: 0,
                });
                let index = process as usize - 1;
                assert_eq!(
                    index,
                    self.processes.len() - 1,
                    "processes are numbered in order"
                );
                self.send(host, 1, Message::Start(index));
            }
            JobAction::Kill { rank, process, why } => {
                self.say(format!("rank {rank}: process {process} is {why}"));
                let index = process as usize - 1;
                self.judge_kill(index, &why);
                self.send(self.processes[index].host, 1, Message::Signal(index, KILL));
            }
            JobAction::Tell {
                process, message, ..
            } => {
                if let ToRank::Welcome { generation, .. } = message
                    && generation as usize != self.together.len()
                {
                    self.wrong(format!("a newcomer hears of generation {generation}"));
                }
                if let ToRank::Formed(formed) = &message {
                    let members = self.state.members.iter();
                    let all: Vec<usize> = members.map(|it| it.process as usize - 1).collect();
                    if !self.together.contains_key(&formed.number) {
                        let ranks: Vec<usize> = formed.members.iter().map(|it| it.rank).collect();
                        self.outcome.joined += formed.change.joined.len();
                        self.judge_generation(formed);
                        self.say(format!(
                            "generation {} of ranks {ranks:?}: {:?}",
                            formed.number, formed.change
                        ));
                        self.together.insert(formed.number, Together::of(all));
                    }
                }
                let index = process as usize - 1;
                self.send(
                    self.processes[index].host,
                    1,
                    Message::ToRank(index, message),
                );
            }
            JobAction::Signal(signal, why) => {
                self.say(format!("all are sent signal {signal}, because {why}"));
                if signal == KILL {
                    self.judge_kill_of_all();
                }
                for index in 0..self.processes.len() {
                    if self.processes[index].phase != Phase::Ended {
                        self.send(
                            self.processes[index].host,
                            1,
                            Message::Signal(index, signal),
                        );
                    }
                }
            }
            JobAction::Leave(host, why) => {
                self.say(format!("host {host} is left, because {why}"));
                self.leaves(host);
            }
            JobAction::Call { host, why } => {
                self.say(format!("host {host} is called, because {why}"));
                self.is_called(host);
            }
            JobAction::LetIn {
                host,
                connection,
                why,
            } => {
                self.say(format!("agent {connection} is let in, because {why}"));
                self.lets_in(host, connection);
            }
            JobAction::TurnAway { connection, why } => {
                self.say(format!("agent {connection} is turned away, because {why}"));
                self.turns_away(connection);
            }
            JobAction::Print(line) => self.say(format!("launcher: {line}")),
        }
    }
}
