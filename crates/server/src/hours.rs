//! Hours of the day, by the clock of this host.

use chrono::{Local, NaiveTime};

use crate::spec::SpecError;

/// From one time of the day to another, which may be of the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hours {
    from: NaiveTime,
    to: NaiveTime,
}

impl Hours {
    /// Reads `22:00-06:00`.
    ///
    /// # Errors
    /// What is none, or no time at all.
    pub(crate) fn parse(text: &str) -> Result<Self, SpecError> {
        let time = |text: &str| NaiveTime::parse_from_str(text, "%H:%M").ok().filter(|_| text.len() == 5);
        let ends = text.split_once('-').and_then(|(from, to)| Some((time(from)?, time(to)?)));
        let (from, to) =
            ends.filter(|(from, to)| from != to).ok_or_else(|| SpecError::Hours { text: text.to_owned() })?;
        Ok(Self { from, to })
    }

    /// Whether it is one of them now.
    pub(crate) fn is_now(self) -> bool {
        self.has(Local::now().time())
    }

    fn has(self, time: NaiveTime) -> bool {
        let Self { from, to } = self;
        if from < to { (from..to).contains(&time) } else { time >= from || time < to }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_may_pass_midnight() {
        let is_in = |hours: &str, time: &str| {
            Hours::parse(hours).unwrap().has(NaiveTime::parse_from_str(time, "%H:%M:%S").unwrap())
        };
        for (time, by_night, by_day) in [
            ("22:00:00", true, false),
            ("21:59:59", false, true),
            ("23:59:59", true, false),
            ("00:00:00", true, false),
            ("05:59:59", true, false),
            ("06:00:00", false, true),
        ] {
            assert_eq!(
                (is_in("22:00-06:00", time), is_in("06:00-22:00", time)),
                (by_night, by_day),
                "{time}"
            );
        }
        for wrong in ["", "22:00", "22:00-24:00", "22:00-22:00", "22-6", "1:00-2:00", "22:00-06:00 "] {
            assert_eq!(Hours::parse(wrong), Err(SpecError::Hours { text: wrong.to_owned() }), "{wrong}");
        }
    }
}
