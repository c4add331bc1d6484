//! A bar for each rail, and one for the whole.

use std::io::IsTerminal;

use ibverbs_rails::{Event, PeerId, Rails};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::Result;

pub(crate) struct Bars {
    whole: ProgressBar,
    /// With the name of the device.
    rails: Vec<(String, ProgressBar)>,
    peer: PeerId,
}

impl Bars {
    pub(crate) fn new(rails: &Rails, peer: PeerId, length: u64, done: u64) -> Result<Self> {
        let all = MultiProgress::new();
        let style = |text: &str| ProgressStyle::with_template(text);
        let bar = || all.add(ProgressBar::new(length));
        let whole = bar();
        whole.set_style(style(
            "{prefix:12} {bar:40} {binary_bytes} of {binary_total_bytes}, {eta} left",
        )?);
        whole.set_prefix("all rails");
        whole.set_position(done);
        let rail = |name: &str| {
            let bar = bar();
            bar.set_style(style(
                "{prefix:12} {bar:40} {binary_bytes}, {binary_bytes_per_sec} {msg}",
            )?);
            bar.set_prefix(name.to_owned());
            Ok((name.to_owned(), bar))
        };
        let bars = rails.devices().map(rail).collect::<Result<_>>()?;
        let bars = Self { whole, rails: bars, peer };
        for (device, _) in rails.rails_up(peer).iter().enumerate().filter(|(_, is_up)| **is_up) {
            bars.note(&Event::RailUp { peer, device });
        }
        Ok(bars)
    }

    pub(crate) fn update(&self, rails: &Rails, done: u64) {
        self.whole.set_position(done);
        for ((_, bar), bytes) in self.rails.iter().zip(rails.bytes_carried(self.peer)) {
            bar.set_position(bytes);
        }
    }

    /// Shows what happens to a rail. Without a terminal, it is printed.
    pub(crate) fn note(&self, event: &Event) {
        let (device, text) = match event {
            Event::RailDown { device, reason, .. } => (*device, format!("down: {reason}")),
            Event::RailUp { device, .. } => (*device, "up".to_owned()),
            _ => return,
        };
        let (name, bar) = &self.rails[device];
        bar.set_message(text.clone());
        if !std::io::stderr().is_terminal() {
            eprintln!("rail {name} is {text}");
        }
    }
}
