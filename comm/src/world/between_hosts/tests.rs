use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Barrier, Mutex};

use super::*;
use crate::tests::on_threads;
use crate::transport::tcp::{MeshChannel, Secret};
use crate::world::meeting::Numbers;

#[test]
fn addresses_of_a_shared_network_are_tried_first_and_this_host_s_own_last() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let own = ["10.1.0.1", "172.17.0.1", "192.168.7.1", "fd77::1"].map(ip);
    let theirs = ["172.17.0.1", "203.0.113.9", "192.168.7.2", "fd77::2"];
    let theirs = theirs.map(|text| SocketAddr::new(ip(text), 4000));
    let sorted = nearest_first(theirs.to_vec(), &own).into_iter();
    let sorted: Vec<String> = sorted.map(|it| it.ip().to_string()).collect();
    let expected = ["192.168.7.2", "fd77::2", "203.0.113.9", "172.17.0.1"];
    assert_eq!(sorted, expected);
}

/// Two ranks that tell each other values through memory.
struct InMemory<'a> {
    numbers: Numbers,
    addresses: Vec<IpAddr>,
    told: &'a Mutex<[Value; 2]>,
    both: &'a Barrier,
    /// What others do who hear what is told.
    overhears: &'a (dyn Fn(&mut [Value; 2]) + Sync),
}

const LONG: Duration = Duration::from_secs(60);

fn secret(text: &str) -> Secret {
    let text = format!("{text}, of sixteen bytes");
    Secret::read(&|name| (name == tcp::SECRET).then(|| text.clone())).unwrap()
}

impl Meeting for InMemory<'_> {
    fn numbers(&mut self) -> &mut Numbers {
        &mut self.numbers
    }

    fn timeout(&self) -> Duration {
        LONG
    }

    fn exchange_within(&mut self, value: &Value, _: Duration) -> Result<Vec<Value>> {
        self.told.lock().unwrap()[self.numbers.came_as] = value.clone();
        if self.both.wait().is_leader() {
            (self.overhears)(&mut self.told.lock().unwrap());
        }
        self.both.wait();
        Ok(self.told.lock().unwrap().to_vec())
    }

    fn network(&mut self, _: &Placement) -> Result<Network> {
        Ok(Network {
            job: "job".into(),
            secret: secret("the secret"),
            addresses: self.addresses.clone(),
            client: None,
        })
    }
}

/// Connects two ranks, of which `overhears` knows the addresses, and sends a message.
fn connect_two(overhears: &(dyn Fn(&mut [Value; 2]) + Sync)) {
    let (told, both) = (Mutex::default(), Barrier::new(2));
    let meeting = |rank| InMemory {
        numbers: Numbers::new(rank, 2),
        addresses: vec!["127.0.0.1".parse().unwrap()],
        told: &told,
        both: &both,
        overhears,
    };
    on_threads(vec![meeting(0), meeting(1)], |mut meeting| {
        let (rank, names) = (meeting.rank(), ["a", "b"]);
        let mesh = connect_hosts(&mut meeting, &Placement::new(&names, rank), &names).unwrap();
        let (channel, mut word) = (MeshChannel::new(&Arc::new(mesh)), [0; 4]);
        let mut letter = match rank {
            0 => channel.send(b"word", 1, 0),
            _ => channel.receive(&mut word, 0, 0),
        };
        while !letter.is_done().unwrap() {}
        drop(letter);
        assert!(rank == 0 || word == *b"word");
        both.wait();
    });
}

fn address_of(told: &Value) -> SocketAddr {
    told[0].as_str().unwrap().parse().unwrap()
}

/// They come before rank 1 does, which one of them holds up: with garbage, as rank 1 itself with
/// all that can be known but the secret, and as one of another job.
#[test]
fn strangers_who_call_a_rank_are_not_taken_in_and_do_not_keep_it_from_the_others() {
    let strangers = Mutex::new(None);
    connect_two(&|told| {
        let (rank_0, holder) = (address_of(&told[0]), TcpListener::bind("127.0.0.1:0"));
        let holder = holder.unwrap();
        told[0] = json!([holder.local_addr().unwrap(), rank_0]);
        *strangers.lock().unwrap() = Some(std::thread::spawn(move || {
            let _held_up = holder.accept().unwrap();
            let mut garbage = TcpStream::connect(rank_0).unwrap();
            garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            for (job, text) in [("mesh job", "a guess"), ("mesh other", "the secret")] {
                let key = JobKey::new(job, secret(text), 1, 2);
                let limit = Duration::from_millis(1);
                let called = tcp::connect(0, || vec![rank_0], "there", &key, 1024, limit);
                assert!(called.is_err(), "a stranger was taken in");
            }
        }));
    });
    let ended = strangers.into_inner().unwrap().unwrap().join();
    ended.expect("no stranger was taken in");
}

/// One holds an address at which rank 1 looks for rank 0, and says again what it hears.
#[test]
fn a_stranger_who_answers_at_an_address_of_a_rank_is_not_believed() {
    connect_two(&|told| {
        let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = stranger.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut caller, _) = stranger.accept().unwrap();
            let mut heard = [0; 1024];
            while let Ok(count @ 1..) = caller.read(&mut heard) {
                _ = caller.write_all(&heard[..count]);
            }
        });
        let rank_0 = address_of(&told[0]).to_string();
        told[0] = json!([address, rank_0]);
    });
}
