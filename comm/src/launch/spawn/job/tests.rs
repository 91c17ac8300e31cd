use std::sync::mpsc;

use proptest::prelude::*;

use super::*;
use crate::launch::spawn::agent::Setup;
use crate::launch::spawn::place::JobPlace;
use crate::launch::spawn::task::Losses;
use crate::rendezvous::Rendezvous;

/// A job of this host and another one.
fn job(place: Option<JobPlace>) -> Job {
    let losses = Losses {
        min_ranks: 1,
        restarts: 0,
    };
    let task = RankCommand {
        losses: Some(losses),
        place,
        program: "true".into(),
        arguments: Vec::new(),
        agent: "",
    };
    let limits = JobLimits {
        grace: Duration::from_secs(60),
        timeout: Duration::from_secs(60),
    };
    let host = |name: &str| ListedHost {
        name: name.into(),
        ranks: 2,
        is_spare: false,
    };
    let hosts = [host("here"), host("far")];
    let mut job = Job::new(
        "test",
        &hosts,
        |index| index == 0,
        limits,
        &task,
        mpsc::channel(),
    );
    job.others.push(Remote::absent("far".into(), 0));
    job
}

fn variables_at(name: &str) -> Option<String> {
    let value = match name {
        "RANK" => "0",
        "WORLD_SIZE" => "2",
        "MASTER_ADDR" => "far",
        "MASTER_PORT" => "9",
        _ => return None,
    };
    Some(value.into())
}

/// Agents that others have started are reached over a connection that is not encrypted.
#[test]
fn a_launcher_sends_its_secret_over_ssh_only() {
    let place = Rendezvous::of_torch(&variables_at).unwrap().map(JobPlace);
    assert!(place.is_some());
    for (place, is_sent) in [(None, true), (place, false)] {
        let job = job(place);
        let variables = job.variables_by_host().unwrap();
        assert_eq!(variables.len(), 2);
        for one in &variables {
            assert_eq!(one.secret.is_some(), is_sent);
            assert!(one.job_number.is_some() && one.host_addresses.is_some());
        }
        // Two jobs of one user have different secrets and numbers.
        let again = job.variables_by_host().unwrap();
        assert_ne!(again[0].job_number, variables[0].job_number);
        assert!(!is_sent || again[0].secret != variables[0].secret);
    }
}

/// Whoever gives an agent orders cannot set a variable such as LD_PRELOAD.
#[test]
fn an_agent_takes_no_variables_but_those_that_ranks_need() {
    for text in [
        r#"{"Start":[1,77,[["LD_PRELOAD","/tmp/x.so"]]]}"#,
        r#"{"Start":[1,77,{"LD_PRELOAD":"/tmp/x.so"}]}"#,
        r#"{"Start":[1,77,{"job_number":"1","PATH":"/tmp"}]}"#,
    ] {
        assert!(serde_json::from_str::<AgentOrder>(text).is_err(), "{text}");
    }
    let names: Vec<&str> = RankVariables {
        job_number: Some("1".into()),
        host_addresses: Some("a".into()),
        secret: Some("x".into()),
    }
    .pairs()
    .map(|(name, _)| name)
    .collect();
    assert_eq!(names, [JOB_NUMBER, HOST_ADDRESSES, "DDP_JOB_SECRET"]);
}

/// What agents and launchers say, with numbers that mean nothing.
fn news() -> impl Strategy<Value = String> {
    let number = prop_oneof![
        Just("0"),
        Just("3"),
        Just("18446744073709551615"),
        Just("-1")
    ];
    (0..8usize, number.clone(), number).prop_map(|(kind, one, other)| match kind {
        0 => format!(r#"{{"Ended":[{one},1,{other}]}}"#),
        1 => format!(r#"{{"Said":[{one},1,{{"Progress":{other}}}]}}"#),
        2 => format!(r#"{{"Said":[{one},1,{{"Misses":{{"generation":1,"ranks":[{other}],"have_met":true}}}}]}}"#),
        3 => format!(r#"{{"Stopped":[{one},1,true]}}"#),
        4 => format!(r#"{{"Signal":{other}}}"#),
        5 => format!(r#"{{"Alive":{other}}}"#),
        6 => r#"{"Ready":{"own":"no address","launcher":null}}"#.to_string(),
        _ => r#"{"Refused":"why"}"#.to_string(),
    })
}

proptest! {
    #[test]
    fn whatever_an_agent_says_the_launcher_goes_on(all in prop::collection::vec(news(), 0..20)) {
        let mut job = job(None);
        for text in all {
            if let Ok(news) = serde_json::from_str::<News>(&text) {
                job.hear(0, news);
            }
        }
    }

    #[test]
    fn messages_that_were_changed_are_parsed_or_dropped(
        at in any::<prop::sample::Index>(),
        bytes in prop::collection::vec(any::<u8>(), 0..5),
        text in news(),
    ) {
        let mut text = text.into_bytes();
        let at = at.index(text.len());
        let end = text.len().min(at + bytes.len().max(1));
        text.splice(at..end, bytes);
        _ = serde_json::from_slice::<News>(&text);
        _ = serde_json::from_slice::<AgentOrder>(&text);
        _ = serde_json::from_slice::<Setup>(&text);
    }
}
