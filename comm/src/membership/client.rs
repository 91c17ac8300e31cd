//! A rank's end: what it says to the launcher, and what it has been told.

use super::wire::{Generation, Told};

/// What a rank has been told: plain data.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// With fewer ranks the job saves and ends.
    pub min_ranks: usize,
    /// By rank: its host.
    pub hosts: Vec<usize>,
    /// The current generation when this process came; 0 before the first.
    pub first: u32,
    /// The last generation of which it is.
    pub generation: Option<Generation>,
    /// The last generation that is over.
    pub over: u32,
    /// Whether processes wait to be taken in.
    pub newcomers: bool,
    /// The exit code of a job that ends.
    pub ends: Option<u8>,
}

impl Heard {
    /// Takes note of what the launcher says.
    pub fn hear(&mut self, told: Told) {
        match told {
            Told::Welcome {
                min_ranks,
                hosts,
                generation,
            } => (self.min_ranks, self.hosts, self.first) = (min_ranks, hosts, generation),
            Told::Formed(generation) => {
                self.hosts.clone_from(&generation.hosts);
                self.newcomers = false;
                self.generation = Some(generation);
            }
            Told::Over(generation) => self.over = generation,
            Told::Newcomers(are_there) => self.newcomers = are_there,
            Told::Ends(code) => _ = self.ends.get_or_insert(code),
            Told::Alive => {}
        }
    }

    /// The number of the last generation of which this process is; 0 for none.
    pub fn current(&self) -> u32 {
        self.generation.as_ref().map_or(0, |it| it.number)
    }

    /// Whether the generation of this process is over.
    pub fn is_over(&self) -> bool {
        self.current() > 0 && self.over == self.current()
    }
}
