use std::time::Duration;

use super::*;
use crate::agent::tests::{Scripted, guards, properly};

const SHORT: Patience = Patience {
    sync: Duration::from_millis(300),
    freeze: Duration::from_millis(300),
    thaw: Duration::from_millis(300),
};

fn quiesce(disks: &[WithAgent], how: Quiesce, patience: Patience) -> Result<Quiesced, Error> {
    let agent = disks.iter().find_map(|(_, agent)| agent.clone()).unwrap_or_default();
    super::quiesce(disks, how, patience, &guards(&agent))
}

fn disks(agents: &[Option<&Scripted>]) -> Vec<WithAgent> {
    let named = agents.iter().enumerate();
    named.map(|(number, agent)| (format!("disk{number}"), agent.map(Scripted::socket))).collect()
}

fn count(agent: &Scripted, command: &str) -> usize {
    agent.heard().iter().flatten().filter(|heard| *heard == command).count()
}

fn label(quiesced: &Quiesced) -> Option<String> {
    quiesced.label().map(|(key, value)| format!("{key}={value}"))
}

#[test]
fn disks_of_one_guest_freeze_it_once_and_every_guest_is_thawed() {
    let agents = [(); 2].map(|()| Scripted::start(|_, command| properly(command)));
    let asked = disks(&[Some(&agents[0]), Some(&agents[1]), Some(&agents[0])]);
    for how in [Quiesce::Auto, Quiesce::Always] {
        let mut quiesced = quiesce(&asked, how, SHORT).unwrap();
        assert_eq!((quiesced.is_quiesced(), label(&quiesced)), (true, Some("quiesced=true".to_owned())));
        quiesced.thaw(how).unwrap();
    }
    for agent in &agents {
        assert_eq!((count(agent, "guest-fsfreeze-freeze"), count(agent, "guest-fsfreeze-thaw")), (2, 2));
    }
}

#[test]
fn without_an_agent_nothing_is_said_and_nothing_can_be_demanded() {
    let mut none = quiesce(&disks(&[None]), Quiesce::Auto, SHORT).unwrap();
    assert_eq!((none.is_quiesced(), label(&none), none.why_not.clone()), (false, None, None));
    none.thaw(Quiesce::Auto).unwrap();
    let error = quiesce(&disks(&[None]), Quiesce::Always, SHORT).unwrap_err();
    assert!(error.to_string().contains("'disk0' has no guest agent"), "{error}");
}

#[test]
fn never_is_never_and_the_record_says_so() {
    let agent = Scripted::start(|_, command| properly(command));
    let not = quiesce(&disks(&[Some(&agent)]), Quiesce::Never, SHORT).unwrap();
    assert_eq!((label(&not), agent.heard().len()), (Some("quiesced=false".to_owned()), 0));
}

#[test]
fn one_guest_that_does_not_freeze_lets_all_go_on() {
    let good = Scripted::start(|_, command| properly(command));
    let bad = Scripted::start(|_, _| (Vec::new(), false));
    let asked = disks(&[Some(&good), Some(&bad)]);
    let error = quiesce(&asked, Quiesce::Always, SHORT).unwrap_err();
    assert!(matches!(&error, Error::Agent { socket, .. } if *socket == bad.socket()), "{error}");
    let auto = quiesce(&asked, Quiesce::Auto, SHORT).unwrap();
    assert_eq!(label(&auto).as_deref(), Some("quiesced=false"));
    assert!(auto.why_not.as_deref().is_some_and(|why| why.contains("hung up")), "{:?}", auto.why_not);
    let mixed = quiesce(&disks(&[Some(&good), None]), Quiesce::Auto, SHORT).unwrap();
    assert!(mixed.why_not.as_deref().is_some_and(|why| why.contains("'disk1'")), "{:?}", mixed.why_not);
    assert_eq!(count(&good, "guest-fsfreeze-freeze"), count(&good, "guest-fsfreeze-thaw"));
}

#[test]
fn a_guest_that_stays_frozen_is_named() {
    let agent = Scripted::start(|_, command| {
        let thaws = command["execute"] == "guest-fsfreeze-thaw";
        if thaws { (Vec::new(), false) } else { properly(command) }
    });
    let mut quiesced = quiesce(&disks(&[Some(&agent)]), Quiesce::Always, SHORT).unwrap();
    let error = quiesced.thaw(Quiesce::Always).unwrap_err().to_string();
    assert!(error.contains("may stand still") && error.contains("agent.sock"), "{error}");
}

#[test]
fn a_guest_that_went_on_before_it_was_let_go_is_told_of_and_is_an_error_where_it_had_to_stand_still() {
    let agent = Scripted::start(|_, command| {
        let thaws = command["execute"] == "guest-fsfreeze-thaw";
        if thaws { (b"{\"return\": 0}\n".to_vec(), true) } else { properly(command) }
    });
    let asked = disks(&[Some(&agent)]);
    let mut quiesced = quiesce(&asked, Quiesce::Auto, SHORT).unwrap();
    assert!(quiesced.is_quiesced());
    quiesced.thaw(Quiesce::Auto).unwrap();
    assert!(!quiesced.is_quiesced());
    assert!(quiesced.why_not.as_deref().is_some_and(|why| why.contains("0 of 2")), "{:?}", quiesced.why_not);
    let mut quiesced = quiesce(&asked, Quiesce::Always, SHORT).unwrap();
    let error = quiesced.thaw(Quiesce::Always).unwrap_err();
    assert!(matches!(error, Error::ThawedEarly { frozen: 2, thawed: 0, .. }), "{error}");
}
